"""Division of the leaves of a plan into chunks, and leaves that are stepped alone."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.leaf import PLAIN, Scalars
from functional_optim.core.stage import Stage
from functional_optim.core.state import state_tensors
from functional_optim.kernels import Executor, Leaf
from functional_optim.kernels.chunks import (
    ALIGNMENT,
    aliased_indices,
    chunk_key,
    group_chunks,
    has_state_elements,
    tensors_of,
)
from functional_optim.plan.chunks import Chunk, PointwiseChunk, WholeChunk
from functional_optim.plan.item import Item
from functional_optim.plan.leaf_positions import LeafPositions

_DEVICE = attrgetter("device")


def chunks_of(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    groups: Sequence[int],
    rows: Sequence[LeafPositions],
    scalars: Scalars,
) -> tuple[list[Chunk], list[int]]:
    """Return the chunks of some leaves, and the leaves that must be stepped alone.

    A leaf without elements, of which only the step count changes, is in neither.

    Args:
        items: the leaves. Their tensors are not kept.
        groups: for each leaf, the group whose hyper-parameters it has.
        rows: for each leaf, the positions of its tensors.
        scalars: the form of the coefficients. If they are on the device, no number is read from it:
            the leaves of a group are at one step.
    """
    by_chunks, is_host = executor.in_chunks(stages), scalars is Scalars.HOST
    wholes = executor.in_whole_leaves(stages) if is_host else None  # programs take Python's numbers
    marks: dict[Any, tuple[int, ...]] = {}  # one object for all leaves of a group at one step
    leaves: list[Leaf] = []
    places: dict[int, int] = {}
    others: list[int] = []
    for k, (item, group) in enumerate(zip(items, groups, strict=True)):
        if fit_in_table(item.param, item.grad, *state_tensors(item.state.stages)):
            mark = marks.setdefault((group, _step_of(item) if is_host else 0), (group,))
            leaf = Leaf(item.param, item.grad, item.state.stages, mark, item.name)
            places[id(leaf)] = k
            leaves.append(leaf)
        else:
            others.append(k)
    if by_chunks is None and wholes is None:
        return [], list(range(len(items)))
    chunks: list[Chunk] = []
    left = leaves
    end, size = 0, torch.iinfo(torch.int64).bits // 8

    def span(own: Sequence[Leaf]) -> Any:
        nonlocal end
        members = [places[id(leaf)] for leaf in own]
        start, end = end, end + size * sum([len(rows[k].all) for k in members])
        return members, rows, own[0].coefficients[0], own, slice(start, end)

    if by_chunks is not None:
        left = []
        every = group_chunks(stages, leaves, left)
        chunks += [PointwiseChunk(stages, by_chunks, *span(own)) for own in every]
    if wholes is not None:
        chunks += [WholeChunk(stages, wholes, *span(own)) for own in _whole_leaves(left)]
    known = {k for chunk in chunks for k in chunk.members} | set(others)
    alone = [k for k in places.values() if k not in known]
    if by_chunks is not None:
        alone = [k for k in alone if not _is_only_counted(items[k])]
    return chunks, sorted(others + alone)


def _is_only_counted(item: Item) -> bool:
    leaf = Leaf(item.param, item.grad, item.state.stages, (), item.name)
    return not item.param.numel() and not has_state_elements(leaf)


def _step_of(item: Item) -> int:
    return int(item.state.step.reshape(-1)[0])


def _whole_leaves(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Return leaves that kernels step as whole tensors, grouped by coefficients and dtypes."""
    aliased = aliased_indices(leaves)
    found: dict[Any, list[Leaf]] = {}
    for number, leaf in enumerate(leaves):
        own = tensors_of(leaf)
        if number not in aliased and all(map(_is_whole, own)) and len({*map(_DEVICE, own)}) == 1:
            found.setdefault(chunk_key(leaf), []).append(leaf)
    return list(found.values())


def _is_whole(tensor: Tensor) -> bool:
    # On CUDA, the order of a sum depends on the address, so a copy may have another sum.
    is_placed = tensor.is_cpu or (tensor.is_cuda and tensor.data_ptr() % ALIGNMENT == 0)
    plain = is_placed and tensor.is_contiguous() and not tensor.is_conj()
    return plain and not tensor.is_neg() and not is_functorch_wrapped_tensor(tensor)


def fit_in_table(*tensors: Tensor) -> bool:
    """Return True if a kernel may get pointers to these tensors."""
    for one in tensors:
        if type(one) not in PLAIN or one.layout != torch.strided or not (one.is_cpu or one.is_cuda):
            return False
        if one.is_complex() or one.is_inference():
            return False
    return True
