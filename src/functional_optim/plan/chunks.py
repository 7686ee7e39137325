"""The chunks of leaves that lie anywhere: which of them can be stepped together."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.leaf import PLAIN
from functional_optim.core.stage import Stage
from functional_optim.core.state import state_tensors
from functional_optim.kernels import Chunks, Executor, Leaf
from functional_optim.kernels.chunks import Table, aliased_places, joined, pack_key, tensors_of
from functional_optim.kernels.executor import Wholes
from functional_optim.kernels.rounding import note_rounding
from functional_optim.plan.chunk import Chunk, Way
from functional_optim.plan.counts import Counts
from functional_optim.plan.gradients import GradientAddresses
from functional_optim.plan.guard import DTYPE, SHAPE
from functional_optim.plan.item import Item, leaf_at_first_step
from functional_optim.plan.ways import ByLists, ByPacks, ByTable, ByWholes


def state_of(item: Item) -> list[Tensor]:
    """The tensors that a step of a leaf writes to; its step count is another matter."""
    return [item.param, *state_tensors(item.state.stages)]


def chunks_of(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    groups: Sequence[int],
    *,
    counted: bool = True,
) -> list[Chunk]:
    """The chunks of some leaves; a leaf that must be stepped alone is in none.

    Args:
        stages: of the chain.
        executor: that steps the leaves.
        items: the leaves. Their gradients are not kept.
        groups: for each, whose hyper-parameters it has.
        counted: whether steps of them are counted.
    """
    by_chunks = stepper_of(stages, executor, items)
    if by_chunks is None:
        wholes = executor.in_wholes(stages)
        return [] if wholes is None else _whole_leaves(stages, wholes, items, groups, counted)
    kept, leaves = _plain_leaves(items, groups)
    places = {id(leaf.param): place for place, leaf in zip(kept, leaves, strict=True)}
    written = [one for item in items for one in state_of(item)]
    found = []
    for alike in joined(stages, leaves, []):
        members = [places[id(leaf.param)] for leaf, _ in alike]
        own = [items[place]._replace(grad=items[place].param) for place in members]
        longest = max((view for _, view in alike), key=lambda view: view.param.numel())
        # In the gradient's place stands what looks like it: none is kept alive.
        like = longest._replace(grad=longest.param, entries={})
        found.append(
            Chunk(
                stages,
                by_chunks,
                members,
                members == list(range(len(items))),
                longest.coefficients[0],
                Counts([item.state.step for item in own]),
                like,
                GradientAddresses([item.param for item in own], written),
                tuple(_ways(by_chunks, longest, own, [view for _, view in alike])),
                (ByPacks(own, counted=counted),),
            )
        )
    return found


def _whole_leaves(
    stages: Sequence[Stage],
    wholes: Wholes,
    items: Sequence[Item],
    groups: Sequence[int],
    counted: bool,
) -> list[Chunk]:
    """The chunks of a chain that needs whole tensors; a chunk of it is leaves, as they are."""
    places, leaves = _plain_leaves(items, groups)
    aliased = aliased_places(leaves)
    found: dict[Any, list[int]] = {}
    for number, (place, leaf) in enumerate(zip(places, leaves, strict=True)):
        if number not in aliased and all(map(_is_whole, tensors_of(leaf))):
            found.setdefault(pack_key(leaf), []).append(place)
    return [
        _whole_chunk(stages, wholes, items, members, groups[members[0]], counted)
        for members in found.values()
    ]


def _plain_leaves(items: Sequence[Item], groups: Sequence[int]) -> tuple[list[int], list[Leaf]]:
    """Return the leaves that kernels may look into, and where they stand among the items.

    In the place of coefficients is one object for all leaves of a group at one step, which holds
    the number of the group.
    """
    marks: dict[Any, tuple[int, ...]] = {}
    leaves, places = [], []
    for place, (item, group) in enumerate(zip(items, groups, strict=True)):
        if all(map(may_lie_in_table, [*state_of(item), item.grad])):
            mark = marks.setdefault((group, int(item.state.step)), (group,))
            leaves.append(Leaf(item.param, item.grad, item.state.stages, mark, item.name))
            places.append(place)
    return places, leaves


def _is_whole(tensor: Tensor) -> bool:
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj()
    return plain and not tensor.is_neg() and not is_functorch_wrapped_tensor(tensor)


def _whole_chunk(
    stages: Sequence[Stage],
    wholes: Wholes,
    items: Sequence[Item],
    members: list[int],
    group: int,
    counted: bool,
) -> Chunk:
    own = [items[place]._replace(grad=items[place].param) for place in members]
    leaves = [Leaf(one.param, one.param, one.state.stages, (), one.name) for one in own]
    kinds = {(one.param.shape, one.param.dtype): one for one in leaves}
    written = [one for item in items for one in state_of(item)]

    def counts(places: Sequence[int]) -> Counts:
        return Counts([own[k].state.step for k in places])

    way = ByWholes(
        wholes.bind_leaves(stages, leaves), list(kinds.values()), counts if counted else None
    )
    return Chunk(
        stages,
        wholes,
        members,
        members == list(range(len(items))),
        group,
        Counts([item.state.step for item in own]),
        leaves[0]._replace(entries={}),
        GradientAddresses([item.param for item in own], written),
        (way,),
    )


def stepper_of(stages: Sequence[Stage], executor: Executor, items: Sequence[Item]) -> Chunks | None:
    """Return what steps some leaves in chunks; None if each is stepped as it is."""
    if executor.in_chunks(stages) is not None or executor.in_wholes(stages) is not None:
        for item in {id(item.hypers): item for item in items if item.hypers}.values():
            note_rounding(stages, leaf_at_first_step(stages, item))
    return executor.in_chunks(stages)


def may_lie_in_table(tensor: Tensor) -> bool:
    """Return True if a kernel may be given a pointer to a tensor."""
    plain = type(tensor) in PLAIN and tensor.layout == torch.strided
    plain = plain and (tensor.is_cpu or tensor.is_cuda)
    return plain and not tensor.is_complex() and not tensor.is_inference()


def _ways(
    executor: Chunks, like: Leaf, items: Sequence[Item], views: Sequence[Leaf]
) -> Iterator[Way]:
    """Return the ways of stepping leaves where they are."""
    if executor.joins:
        yield ByTable(Table.of_tensors(list(map(tensors_of, views))))
    columns = _columns(executor, like, items)
    if columns:
        yield ByLists(columns)


def _columns(executor: Chunks, like: Leaf, items: Sequence[Item]) -> Sequence[list[Tensor]]:
    """The leaves of a chunk as lists; none where the executor takes no such, or leaves do not fit.

    A gradient has the layout of its parameter, so all tensors of a leaf have to have that.
    """
    if not executor.takes_lists(like):
        return ()
    rows = [state_of(item) for item in items]
    for param, *states in rows:
        if any((one.shape, one.stride()) != (param.shape, param.stride()) for one in states):
            return ()
    return [list(column) for column in zip(*rows, strict=True)]


class ShapeGuard:
    """Guard: tensors still have their shapes and dtypes.

    Args:
        tensors: to be looked at.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._shapes, self._dtypes = self._now()

    def hold(self) -> bool:
        """Return True if they have."""
        return (self._shapes, self._dtypes) == self._now()

    def _now(self) -> tuple[list[torch.Size], list[torch.dtype]]:
        return list(map(SHAPE, self._tensors)), list(map(DTYPE, self._tensors))
