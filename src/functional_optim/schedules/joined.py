"""Several schedules, one after the other.

s(n) = s_i(n - b_i) for the last i with b_i <= n, where b_0 = 0
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.brief import brief
from functional_optim.core.schedule_value import ScheduleValue, function, whole, written
from functional_optim.schedules.arithmetic import select, since


@dataclass(frozen=True, repr=False)
class Joined(ScheduleValue):
    """Made by :func:`joined`."""

    schedules: tuple[Callable[[Any], Any], ...]
    boundaries: tuple[int, ...]
    maker: ClassVar[str] = "joined"

    def __call__(self, made: Any) -> Any:
        return self._from(0, since(made))

    def _from(self, place: int, made: Any) -> Any:
        """The value, where it is that of the schedule at a place or of a later one."""
        start = self.boundaries[place - 1] if place else 0
        here = self.schedules[place]
        if place == len(self.boundaries):
            return here(since(made, start))
        return select(
            made,
            self.boundaries[place],
            lambda: here(since(made, start)),
            lambda: self._from(place + 1, made),
        )

    def __repr__(self) -> str:
        return f"joined([{', '.join(map(written, self.schedules))}], {list(self.boundaries)})"


def joined(schedules: Sequence[Callable[[Any], Any]], boundaries: Sequence[int]) -> Joined:
    """Several schedules, one after the other; each counts steps from where it begins.

    ``s(n) = s_i(n - b_i)`` for the last ``i`` with ``b_i <= n``, where ``b_0 = 0``: that of torch's
    SequentialLR with ``milestones = boundaries``.

    Args:
        schedules: those of this package, or functions of the steps made. Where a step is traced, or
            captured, all of them are computed at each step, and must be torch's operations.
        boundaries: one fewer: whole numbers >= 1, each larger than the one before, of steps made
            when the next schedule begins.

    Returns:
        A schedule, to be hashed, compared and pickled if all its parts are.

    Raises:
        TypeError, ValueError: no schedule, or a value outside the bounds above.

    Example::

        >>> from functional_optim import constant, cosine
        >>> held = joined([constant(0.1), cosine(0.1, to=0.01, steps=900)], [100])
        >>> held
        joined([constant(0.1), cosine(0.1, to=0.01, steps=900)], [100])
        >>> held(100.0), held(1000.0)
        (0.1, 0.01)
    """
    if not isinstance(schedules, (list, tuple)) or not schedules:
        raise TypeError(f"joined: schedules must be a list of schedules, got {brief(schedules)}")
    if not isinstance(boundaries, (list, tuple)) or len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"joined: boundaries must be a list of {len(schedules) - 1} whole numbers, one fewer "
            f"than there are schedules, got {brief(boundaries)}"
        )
    least = 1
    for index, boundary in enumerate(boundaries):
        least = whole(f"joined: boundaries[{index}]", boundary, least) + 1
    return Joined(
        tuple(function(f"joined: schedules[{i}]", one) for i, one in enumerate(schedules)),
        tuple(boundaries),
    )
