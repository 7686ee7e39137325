"""What one step of a bound optimizer has to do: lanes, and the coefficients for each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.block_ends import BlockEnds, filled
from functional_optim.bound_buffer import BoundBuffer
from functional_optim.bound_gradients import Gathered
from functional_optim.executors import LaneExecutor, Leaf
from functional_optim.flat_layout import FlatLayout
from functional_optim.stage import Stage


class Work(NamedTuple):
    """One lane to be stepped."""

    buffer: BoundBuffer
    lane: Leaf
    part: slice
    """Which segments of the buffer it holds."""


At = Callable[[tuple[Any, ...], float, Tensor], tuple[tuple[Any, ...], tuple[Any, ...]]]
"""``at(hypers, step, count)``: hyper-parameters and coefficients of every stage, for a step.

``count`` holds how many steps were made before it, as a tensor.
"""


def works(
    buffers: Sequence[BoundBuffer],
    hypers: Sequence[tuple[Any, ...]],
    given: Sequence[Tensor | None] | None,
    gathered: Gathered,
    *,
    at: At,
    plain: bool,
    filled: bool = True,
) -> list[Work]:
    """The lanes of a step.

    Args:
        buffers: that are stepped as lanes.
        hypers: of each parameter.
        given: a gradient or None for each parameter; None if all are in the flat buffers.
        gathered: where the gradients are.
        at: gives hyper-parameters and coefficients.
        plain: whether the hyper-parameters are plain numbers, the same at each step.
        filled: whether last blocks are filled up (see :mod:`functional_optim.block_ends`).
    """
    made: dict[tuple[float, int], tuple[Any, Any]] = {}
    work = []
    for number, buffer in enumerate(buffers):
        mask: tuple[int | None, ...] | None = None
        if gathered.missing:
            assert given is not None
            mask = tuple(None if given[one.index] is None else 0 for one in buffer.segments)
        own = hypers[buffer.segments[0].index]
        for lane, step, part in buffer.lanes(mask, filled=filled):
            # What Python knows of counts on a device is only which may be stepped together.
            key = (number, part.start) if buffer.counts_beside else (step, id(own))
            if key not in made:
                made[key] = at(own, step, buffer.count(part.start))
            resolved, coefficients = made[key]
            memo = buffer.memo(own, part, lane.param.numel()) if plain else None
            leaf = lane._replace(coefficients=coefficients, hypers=resolved, step=step, memo=memo)
            work.append(Work(buffer, leaf, part))
    return work


def step_lanes(
    executor: LaneExecutor,
    stages: Sequence[Stage],
    lanes: Sequence[Leaf],
    totals: Sequence[Tensor],
    ends: Sequence[BlockEnds],
    layout: FlatLayout,
) -> None:
    """Step lanes, of which no tensor is followed by autograd, one after the other.

    Args:
        executor: it takes them all.
        stages: of the chain.
        lanes: to be stepped.
        totals: what was measured.
        ends: of the blocks that are to be filled up meanwhile.
        layout: where the parameters lie.
    """
    try:
        with filled(ends):
            for lane in lanes:
                executor.step_lane(stages, lane, totals)
    except BaseException:
        layout.mark_changed()  # some have been stepped, perhaps
        raise
