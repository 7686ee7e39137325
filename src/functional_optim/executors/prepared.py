"""A lane that comes again at each step, in the same memory: only its numbers are new."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.executors.leaf import Leaf
from functional_optim.executors.reading import Reading, reader

MOST = 1 << 16
"""Elements up to which lanes are prepared: of more, finding out takes no time beside the work."""

Make = Callable[[tuple[Any, ...], float], "Callable[[], object] | None"]
"""What makes a step of the coefficients of every stage and its number.

None where the lane has to be looked at anew: they are not of the kind that it was prepared for.
"""


class Prepared:
    """Steps one lane, call by call.

    Args:
        make: asked only where the coefficients are another object than at the last step. As long as
            they are the same one, so is the mathematics, whatever the number of the step.

    Example::

        >>> made = Prepared(lambda coefficients, step: lambda: print(coefficients, step))
        >>> made.feed((0.5,), 1.0)
        True
        >>> made.run()
        (0.5,) 1.0
    """

    __slots__ = ("_make", "_seen", "run")

    def __init__(self, make: Make) -> None:
        self._make = make
        self._seen: tuple[Any, ...] | None = None
        self.run: Callable[[], object]

    def feed(self, coefficients: tuple[Any, ...], step: float) -> bool:
        """Take what the next step is made of, and change nothing.

        Returns:
            Whether ``run()`` is that step. If not, the lane has to be looked at anew.
        """
        if coefficients is self._seen:
            return True
        run = self._make(coefficients, step)
        if run is None:
            return False
        self.run, self._seen = run, coefficients
        return True


def is_short(lane: Leaf) -> bool:
    """Whether it is worth while to prepare a lane, which is on the CPU then."""
    return lane.param.is_cpu and 0 < lane.param.numel() <= MOST


def prepared(
    lane: Leaf,
    reading: Reading,
    tensors: Sequence[Tensor],
    prologue: Callable[..., Sequence[Any]],
    step: Callable[..., object],
    scratch: Sequence[torch.dtype],
) -> Prepared:
    """A lane that a program steps.

    Args:
        lane: the lane.
        reading: what the program depends on.
        tensors: of the lane.
        prologue: ``prologue(numbers, totals)`` gives the uniform values.
        step: ``step(tensors, uniform values, scratch)``.
        scratch: the dtypes of its scratch, which this lane has for itself.
    """
    fetch = reader(reading.classes, reading.shape.static)
    with torch.inference_mode(mode=False):
        room = [lane.param.new_empty(lane.param.numel(), dtype=dtype) for dtype in scratch]

    def make(coefficients: tuple[Any, ...], step_number: float) -> Callable[[], object] | None:
        numbers = fetch(coefficients)
        if numbers is None:
            return None
        return partial(step, *tensors, *prologue(numbers, ()), *room)

    return Prepared(make)
