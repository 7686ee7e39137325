"""Division of the leaves of a plan into chunks, and leaves that are stepped alone."""

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor
from functional_optim.core.leaf import PLAIN, Scalars, layouts_of
from functional_optim.core.stage import Stage
from functional_optim.kernels import Executor
from functional_optim.kernels.chunks import (
    ALIGNMENT,
    flat_views,
    why_not_flat,
)
from functional_optim.plan.chunks import UNBOUND, Chunk, PointwiseChunk, WholeChunk
from functional_optim.plan.leaf_positions import LeafPositions

_DEVICE, _DTYPE = attrgetter("device"), attrgetter("dtype")
_POINTER = torch.iinfo(torch.int64).bits // 8
"""Number of bytes of a pointer."""


def chunks_of(
    stages: Sequence[Stage],
    executor: Executor,
    rows: Sequence[LeafPositions],
    positions: Sequence[Sequence[int]],
    tensors: Sequence[Tensor],
    groups: Sequence[int],
    scalars: Scalars,
) -> tuple[list[Chunk], list[int], list[int]]:
    """Return the chunks of some leaves, the leaves that are stepped alone, and one of each kind.

    Leaves of a kind have the same group, step count and layouts. A leaf without elements is in no
    chunk, and is not stepped alone: only its step count changes. If the coefficients are on the
    device, the host does not read step counts: all leaves of a group have the same step count.

    Args:
        rows: for each leaf, the positions of its tensors.
        positions: for each leaf, the positions of its parameter, gradient and state.
        groups: for each leaf, the index of its group of hyper-parameters.
        scalars: the form of the coefficients.
    """
    by_chunks, is_host = executor.in_chunks(stages), scalars is Scalars.HOST
    wholes = executor.in_whole_leaves(stages) if is_host else None  # programs take Python's numbers
    every = [[tensors[k] for k in own] for own in positions]
    counts = [tensors[row.step] for row in rows]
    steps = [(one if one.dim() == 0 else one[0]).item() if is_host else 0 for one in counts]
    kinds = _kinds_of(every, steps, groups)
    fit = {k for own in kinds.values() if fit_in_table(*every[own[0]]) for k in own}
    left, found = set(range(len(rows))), dict[Any, list[int]]()
    for (group, step, *_), members in kinds.items():
        like = every[members[0]]
        if members[0] not in fit:
            continue
        if by_chunks is not None and not any(map(Tensor.numel, like)):
            left.difference_update(members)
            continue
        is_flat = by_chunks is not None and _is_flat(stages, rows[members[0]], tensors)
        if is_flat or (wholes is not None and _are_whole(like)):
            key = is_flat, group, step, like[0].device, tuple(map(_DTYPE, like))
            own = [k for k in members if is_flat or _are_aligned(every[k])]
            found.setdefault(key, []).extend(own)
    chunks: list[Chunk] = []
    end = 0
    for (is_flat, group, *_), own in sorted(found.items(), key=lambda one: not one[0][0]):
        members, start = sorted(own), end
        left.difference_update(members)
        end += _POINTER * sum([len(positions[k]) for k in members])
        given = members, rows, group, tensors, slice(start, end)
        if members and is_flat and by_chunks is not None:
            chunks.append(PointwiseChunk(stages, by_chunks, *given))
        elif members and wholes is not None:
            chunks.append(WholeChunk(stages, wholes, *given))
    return chunks, sorted(left), [members[0] for members in kinds.values()]


def _kinds_of(
    leaves: Sequence[Sequence[Tensor]], steps: Sequence[Any], groups: Sequence[int]
) -> dict[Any, list[int]]:
    """Return the indices of the leaves of each kind: of one group, step count and layouts."""
    keys = iter(layouts_of([tensor for own in leaves for tensor in own]))
    kinds: dict[Any, list[int]] = {}
    for k, own in enumerate(leaves):
        kinds.setdefault((groups[k], steps[k], *islice(keys, len(own))), []).append(k)
    return kinds


def _is_flat(stages: Sequence[Stage], row: LeafPositions, tensors: Sequence[Tensor]) -> bool:
    """Return True if leaves with these layouts can be chunks, if they share no memory."""
    leaf = row.leaf(tensors, UNBOUND)
    return bool(leaf.param.numel() and not why_not_flat(stages, leaf) and flat_views(leaf))


def _are_whole(tensors: Sequence[Tensor]) -> bool:
    """Return True if kernels can step leaves with these layouts as whole tensors."""
    odd = [one.is_conj() or one.is_neg() or is_functorch_wrapped_tensor(one) for one in tensors]
    contiguous = all(map(Tensor.is_contiguous, tensors))
    return contiguous and not any(odd) and len({*map(_DEVICE, tensors)}) == 1


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    # On CUDA, the order of a sum depends on the address, so a copy may have another sum.
    return tensors[0].is_cpu or all(one.data_ptr() % ALIGNMENT == 0 for one in tensors)


def fit_in_table(*tensors: Tensor) -> bool:
    """Return True if a kernel may get pointers to these tensors."""
    for one in tensors:
        if type(one) not in PLAIN or one.layout != torch.strided or not (one.is_cpu or one.is_cuda):
            return False
        if one.is_complex() or one.is_inference():
            return False
    return True
