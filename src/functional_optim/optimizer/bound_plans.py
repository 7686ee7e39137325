"""The plans of a bound optimizer: of runs of its flat buffers, or of leaves where they lie."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState
from functional_optim.kernels import Chunks, Executor
from functional_optim.kernels.chunks import Table, tensors_of
from functional_optim.optimizer.bound_buffer import BoundBuffer
from functional_optim.plan import Chunk, Counts, GradientAddresses, Memory, StepPlan
from functional_optim.plan.chunk import Way
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.item import Item
from functional_optim.plan.ways import ByPacks, ByRuns, ByTable

LEAST = 1 << 14
"""Elements of a buffer from which separate gradients are read where they lie: fewer are copied in
less time."""

Present = Sequence[bool] | None
"""Whether each parameter has a gradient; None where all have one."""


class BoundParams(NamedTuple):
    """Bound parameters, as plans are made of them."""

    stages: Sequence[Stage]
    executor: Executor
    layout: FlatLayout
    params: Sequence[Tensor]
    names: Sequence[str]
    states: Sequence[LeafState]
    groups: Sequence[int]
    """For each parameter, whose hyper-parameters it has."""
    buffers: Sequence[BoundBuffer]
    views: Sequence[Tensor | None]
    """For each parameter, its gradient as its buffer would hold it."""

    def item(self, place: int) -> Item:
        """A parameter as a leaf; its gradient is given at each step."""
        param = self.params[place]
        return Item(param, param, self.states[place], (), self.names[place])

    def run(self, buffer: BoundBuffer, run: slice) -> Item:
        """Neighbours in a buffer as one leaf, with the step count of the first."""
        chunk = buffer.chunk(run)
        state = LeafState(buffer.count(run.start), chunk.states)
        return Item(chunk.param, chunk.grad, state, (), chunk.name)

    def memory(self) -> Memory:
        """Return the tensors that steps check."""
        written = [*self.layout.params, *(one for each in self.buffers for one in each.written)]
        return Memory([*written, *self.layout.gradient_buffers()], len(written))


class BoundPlan(NamedTuple):
    """A plan, and the gradients that it takes."""

    plan: StepPlan
    gradients: Callable[[Sequence[Any]], list[Any]]
    """Those of its leaves, of the gradients of all parameters."""


def plan_of(bound: BoundParams, present: Present, flat: Sequence[BoundBuffer]) -> BoundPlan:
    """The plan of a step.

    Args:
        bound: what was bound.
        present: which parameters have a gradient.
        flat: buffers in which neighbours are stepped as one, by the gradients there. Each other
            parameter is a leaf, whose gradient is read wherever it lies.
    """
    items: list[Item] = []
    groups: list[int] = []
    chunks: list[Chunk] = []
    by_chunks = bound.executor.in_chunks(bound.stages)
    for buffer in flat:
        assert by_chunks is not None, "only chunks are stepped as one"
        group = bound.groups[buffer.segments[0].index]
        for together in _by_count(buffer, buffer.runs(present)):
            members = range(len(items), len(items) + len(together))
            chunks.append(_of_runs(bound, by_chunks, buffer, together, members, group))
            items += [bound.run(buffer, run) for run in together]
            groups += [group] * len(together)
    fixed = [item.grad for item in items]
    places: list[int] = []
    for buffer in (one for one in bound.buffers if one not in flat):
        group = bound.groups[buffer.segments[0].index]
        alone = [slice(k, k + 1) for k in range(len(buffer.segments))]
        kept = [one for one in alone if _is_in(present, buffer.segments[one.start].index)]
        for together in _by_count(buffer, kept):
            members = range(len(items), len(items) + len(together))
            own = [one.start for one in together]
            if by_chunks is not None and by_chunks.joins and buffer.whole.param.is_cpu:
                chunks.append(_of_rows(bound, by_chunks, buffer, own, members, group))
            indices = [buffer.segments[k].index for k in own]
            items += map(bound.item, indices)
            groups += [group] * len(indices)
            places += indices
    rest = {one.index for buffer in bound.buffers for one in buffer.segments}
    others = [i for i in range(len(bound.params)) if i not in rest and _is_in(present, i)]
    items += map(bound.item, others)
    groups += [bound.groups[i] for i in others]
    places += others
    for chunk in chunks:
        chunk.is_all = len(chunk.members) == len(items)
    plan = StepPlan(
        bound.stages, bound.executor, items, groups, chunks=chunks, memory=bound.memory()
    )
    in_order = not fixed and places == list(range(len(bound.params)))

    def gradients(every: Sequence[Any]) -> list[Any]:
        if in_order and isinstance(every, list):
            return every
        return [*fixed, *map(every.__getitem__, places)]

    return BoundPlan(plan, gradients)


def _is_in(present: Present, place: int) -> bool:
    return present is None or present[place]


def _by_count(buffer: BoundBuffer, runs: Sequence[slice]) -> list[list[slice]]:
    """Runs that are at the same step."""
    made = buffer.made()
    found: dict[int, list[slice]] = {}
    for run in runs:
        found.setdefault(made[run.start], []).append(run)
    return list(found.values())


def _places(runs: Sequence[slice]) -> list[int]:
    return [k for run in runs for k in range(run.start, run.stop)]


def _of_runs(
    bound: BoundParams,
    by_chunks: Chunks,
    buffer: BoundBuffer,
    runs: Sequence[slice],
    members: Sequence[int],
    group: int,
) -> Chunk:
    """Runs of a buffer as a chunk."""
    leaves = [buffer.chunk(run)._replace(entries={}) for run in runs]
    like = max(leaves, key=lambda leaf: leaf.param.numel())
    counts = Counts.within(buffer.counts, _places(runs))
    parts = [partial(Counts.within, buffer.counts, _places([run])) for run in runs]
    ways: tuple[Way, ...] = (ByRuns(leaves, parts),)
    if by_chunks.joins and like.param.is_cpu:
        ways = (ByTable(Table.of_tensors(list(map(tensors_of, leaves)))), *ways)
    return Chunk(bound.stages, by_chunks, members, False, group, counts, like, None, ways)


def _of_rows(
    bound: BoundParams,
    by_chunks: Chunks,
    buffer: BoundBuffer,
    own: Sequence[int],
    members: Sequence[int],
    group: int,
) -> Chunk:
    """Segments of a buffer as leaves of a chunk, which a kernel may step together."""
    table = Table.of(
        [buffer.segments[k].numel for k in own], [one for k in own for one in buffer.row(k)]
    )
    like = [bound.views[buffer.segments[k].index] for k in own]
    items = [bound.item(buffer.segments[k].index) for k in own]
    # A complex leaf lies there as twice as many real elements, and in a pack as what it is.
    is_real = not any(item.param.is_complex() for item in items)
    written = [one for each in bound.buffers for one in each.written]
    return Chunk(
        bound.stages,
        by_chunks,
        members,
        False,
        group,
        Counts.within(buffer.counts, own),
        buffer.whole._replace(entries={}),
        GradientAddresses([one for one in like if one is not None], written),
        (ByTable(table),),
        (ByPacks(items, counted=True),) if is_real else (),
    )
