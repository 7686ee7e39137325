"""Chunks: the leaves that one call of a kernel steps, each where it lies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.hyper import is_plain
from functional_optim.core.stage import Stage
from functional_optim.core.state import state_tensors
from functional_optim.kernels import Chunks, Executor, Leaf
from functional_optim.kernels.chunks import Table, joined, tensors_of
from functional_optim.kernels.kernel import BindScalars
from functional_optim.plan.counts import Counts
from functional_optim.plan.engine import Item
from functional_optim.plan.gradients import GradientAddresses
from functional_optim.plan.guard import DTYPE, PLAIN, SHAPE
from functional_optim.plan.packs import Pack


@dataclass
class Chunk:
    """Leaves that have hyper-parameters, step count, dtypes and device in common.

    One call of a kernel steps all of them by their table; or each of its runs is stepped by what
    takes it, where no kernel takes a table.
    """

    executor: Chunks
    """That binds a kernel to them."""
    members: Sequence[int]
    """Their places among the leaves of the plan."""
    is_all: bool
    """Whether these are all leaves of the plan, in their order."""
    group: int
    """Whose hyper-parameters they have."""
    counts: Counts
    like: Leaf
    """The longest of them; it stands for all that they have in common."""
    table: Table | None
    """Where they lie; None where no kernel takes pointers."""
    gradients: GradientAddresses | None
    """Where their gradients lie this time; None where these stay where the table says."""
    runs: Sequence[Leaf] = ()
    """The same leaves and gradients as tensors of one dimension, where these stay the same."""
    parts: Sequence[Callable[[], Counts]] = ()
    """Give the counts of each run, where a step is broken off between them."""
    made: int = 0
    """How many steps its leaves had made when they were looked at last."""
    hypers: tuple[Any, ...] = ()
    """Those of the last step."""
    plain: bool = True
    """Whether these are numbers that stay the same from step to step."""
    required: tuple[Any, ...] | None = None
    """Those for which the executor was last seen to take the leaves."""
    resolved: tuple[Any, ...] = ()
    """The same, with the numbers that schedules give for this step."""
    coefficients: tuple[Any, ...] = ()
    """Those of this step."""
    feed: BindScalars | None = None
    """A kernel bound to them, for the choices among the hyper-parameters that were made last."""
    other: BindScalars | None = None
    """The same for the choices before, which may come again: a batch begins, and goes on."""
    columns: Sequence[list[Tensor]] = ()
    """The same leaves as lists of tensors, for an executor that takes such: all parameters, and all
    of each tensor of the state; none where those of a leaf are laid out in several ways."""
    packs: list[Pack] | None = None
    """How they are stepped where no kernel is; found out when that is first so."""
    now: Table | None = None
    """Where they and the gradients of this step lie."""

    def __post_init__(self) -> None:
        self.now = self.table

    def use(self, hypers: tuple[Any, ...]) -> None:
        """Hyper-parameters of this step, where they are others than before."""
        known = set(map(id, self.hypers)) if self.plain else ()
        new = [one for one in hypers if id(one) not in known]
        self.hypers, self.plain = hypers, all(map(is_plain, new))

    def own(self, gradients: list[Tensor]) -> list[Tensor]:
        """Those of its leaves, of the gradients of all leaves."""
        return gradients if self.is_all else [gradients[place] for place in self.members]


def state_of(item: Item) -> list[Tensor]:
    """The tensors that a step of a leaf writes to; its step count is another matter."""
    return [item.param, *state_tensors(item.state.stages)]


def chunks_of(
    stages: Sequence[Stage], executor: Executor, items: Sequence[Item], groups: Sequence[int]
) -> list[Chunk]:
    """The chunks of some leaves; a leaf that must be stepped alone is in none.

    Args:
        stages: of the chain.
        executor: that steps the leaves.
        items: the leaves.
        groups: for each, whose hyper-parameters it has.
    """
    by_chunks = executor.in_chunks(stages)
    if by_chunks is None:
        return []
    marks: dict[Any, tuple[int, ...]] = {}
    leaves, places = [], {}
    for place, (item, group) in enumerate(zip(items, groups, strict=True)):
        if all(map(_may_lie_in_table, [*state_of(item), item.grad])):
            # One object for all leaves of a group at one step, as their coefficients are.
            mark = marks.setdefault((group, int(item.state.step)), (group,))
            leaves.append(Leaf(item.param, item.grad, item.state.stages, mark, item.name))
            places[id(item.param)] = place
    written = [one for item in items for one in state_of(item)]
    return [
        _chunk(by_chunks, items, [places[id(leaf.param)] for leaf, _ in alike], alike, written)
        for alike in joined(stages, leaves, [])
    ]


def _may_lie_in_table(tensor: Tensor) -> bool:
    plain = type(tensor) in PLAIN and tensor.layout == torch.strided
    plain = plain and (tensor.is_cpu or tensor.is_cuda)
    return plain and not tensor.is_complex() and not tensor.is_inference()


def _chunk(
    executor: Chunks,
    items: Sequence[Item],
    members: list[int],
    alike: Sequence[tuple[Leaf, Leaf]],
    written: Sequence[Tensor],
) -> Chunk:
    longest = max((view for _, view in alike), key=lambda view: view.param.numel())
    return Chunk(
        executor,
        members,
        members == list(range(len(items))),
        longest.coefficients[0],
        Counts([items[place].state.step for place in members]),
        # In the gradient's place stands what looks like it: none is kept alive.
        longest._replace(grad=longest.param, entries={}),
        Table.of_tensors([tensors_of(view) for _, view in alike]),
        GradientAddresses([items[place].param for place in members], written),
        columns=_columns(executor, longest, [items[place] for place in members]),
    )


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
    """Whether tensors have the shapes and dtypes that they had.

    Args:
        tensors: to be looked at.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._shapes, self._dtypes = self._now()

    def hold(self) -> bool:
        """Whether they have."""
        return (self._shapes, self._dtypes) == self._now()

    def _now(self) -> tuple[list[torch.Size], list[torch.dtype]]:
        return list(map(SHAPE, self._tensors)), list(map(DTYPE, self._tensors))
