"""The commonest step of a bound optimizer: all gradients in the flat buffers, and nothing new.

It is the step that would be made otherwise, in a fraction of the time: of a few small parameters,
finding out what is to be done takes longer than doing it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.block_ends import BlockEnds
from functional_optim.bound_buffer import BoundBuffer
from functional_optim.bound_work import step_lanes
from functional_optim.engine import coefficients_at
from functional_optim.executors import LaneExecutor, Leaf
from functional_optim.executors.lanes import tensors_of
from functional_optim.executors.prepared import Prepared, is_short
from functional_optim.flat_layout import FlatLayout
from functional_optim.places import Remembered
from functional_optim.stage import Stage

_PREPARING = range(1, 4)
"""After how many steps that were made anew the next ones are prepared."""


class _Part(NamedTuple):
    """A buffer that is stepped as one lane."""

    buffer: BoundBuffer
    hypers: tuple[Any, ...]
    coefficients: Callable[[float], tuple[Any, ...]]


class WholeStep:
    """Steps buffers whole; asked first, at each step.

    Args:
        executor: it takes lanes.
        stages: of the chain, none of them measured.
        buffers: all of them.
        hypers: of each parameter: plain numbers, the same at each step.
        ends: of the blocks that are to be filled up meanwhile.
        layout: where the parameters lie.
    """

    def __init__(
        self,
        executor: LaneExecutor,
        stages: Sequence[Stage],
        buffers: Sequence[BoundBuffer],
        hypers: Sequence[tuple[Any, ...]],
        ends: Sequence[BlockEnds],
        layout: FlatLayout,
    ) -> None:
        self._executor, self._stages = executor, stages
        self._ends, self._layout = ends, layout
        self._buffers, self._hypers = buffers, hypers
        self._parts: list[_Part] = []  # found when they are wanted
        self._made = 0
        self._prepared: list[tuple[_Part, Prepared]] = []
        self._tensors: list[Tensor] = []
        self._count = 0
        self._remembered = Remembered()

    def make(self) -> bool:
        """A step of all parameters.

        Returns:
            Whether it was made; otherwise nothing was changed, and buffers take several lanes.

        Raises:
            RuntimeError: a parameter or buffer that someone has moved, resized or re-pointed.
            KernelError: the executor asked for does not take them.
        """
        if self._prepared and self._is_fed():
            self._check()
            try:
                for _, prepared in self._prepared:
                    prepared.run()
            except BaseException:
                self._layout.mark_changed()  # some have been stepped, perhaps
                raise
        elif not self._is_made_anew():
            return False
        for part in self._parts:
            part.buffer.advance_all()
        return True

    def _is_fed(self) -> bool:
        """Whether what was prepared is the next step."""
        for part, prepared in self._prepared:
            step = part.buffer.next_step()
            if step is None or not prepared.feed(part.coefficients(step), step):
                return False
        return True

    def _check(self) -> None:
        """Everything is where it was, and autograd is told of the step: one look at all of it."""
        if self._remembered.hold(self._tensors, where=True, change=self._count):
            return
        for part in self._parts:
            part.buffer.check()
        self._layout.check(change=True)
        self._remembered.learn(self._tensors)

    def _is_made_anew(self) -> bool:
        """The step, but that it is not counted; False with nothing done."""
        if not self._parts:
            self._parts = list(map(self._part, self._buffers))
        lanes = []
        for part in self._parts:
            part.buffer.check()
            lane = self._lane(part)
            if lane is None:
                return False
            lanes.append(lane)
        self._executor.require(self._stages, lanes)
        # Not for the first step: hyper-parameters may be others at each. Not ever again, where what
        # was prepared is never the next step. And before anything is written: it may fail.
        if self._made in _PREPARING and not self._ends:
            self._prepared = self._prepare(lanes)
        self._made += 1
        self._layout.check(change=True)
        step_lanes(self._executor, self._stages, lanes, (), self._ends, self._layout)
        return True

    def _part(self, buffer: BoundBuffer) -> _Part:
        own = self._hypers[buffer.segments[0].index]
        return _Part(buffer, own, partial(_coefficients, self._stages, own))

    def _lane(self, part: _Part) -> Leaf | None:
        """All of a buffer as one lane."""
        step = part.buffer.next_step()
        if step is None:
            return None
        memo = part.buffer.memo(part.hypers)
        assert memo is not None, "all of it is one lane"
        whole = part.buffer.whole
        coefficients = part.coefficients(step)
        return Leaf(
            whole.param,
            whole.grad,
            whole.states,
            coefficients,
            whole.name,
            part.hypers,
            step,
            memo,
        )

    def _prepare(self, lanes: Sequence[Leaf]) -> list[tuple[_Part, Prepared]]:
        """What makes the next steps, if all lanes are short."""
        if not all(map(is_short, lanes)):
            return []
        found = []
        for part, lane in zip(self._parts, lanes, strict=True):
            prepared = self._executor.prepare(self._stages, lane)
            if prepared is None:
                return []
            found.append((part, prepared))
        if not self._tensors:
            self._tensors = list(self._layout.params)
            self._count = len(self._tensors)
            for lane in lanes:
                self._tensors += tensors_of(lane)
        return found


def _coefficients(stages: Sequence[Stage], hypers: tuple[Any, ...], step: float) -> tuple[Any, ...]:
    return coefficients_at(stages, hypers, step, plain=True)[1]
