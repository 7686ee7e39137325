"""Schedule of several schedules in sequence.

s(n) = s_i(n - b_i) for the last i with b_i <= n, where b_0 = 0
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.format import format_value
from functional_optim.core.schedule_value import (
    ScheduleValue,
    check_int,
    check_schedule,
    format_part,
)
from functional_optim.schedules.arithmetic import select, since


@dataclass(frozen=True, repr=False)
class Joined(ScheduleValue):
    """Schedule that :func:`joined` returns."""

    schedules: tuple[Callable[[Any], Any], ...]
    boundaries: tuple[int, ...]
    maker: ClassVar[str] = "joined"

    def __call__(self, made: Any) -> Any:
        return self._from(0, since(made))

    def _from(self, index: int, made: Any) -> Any:
        """Return the value of the schedule at this index, or of a later schedule."""
        start = self.boundaries[index - 1] if index else 0
        here = self.schedules[index]
        if index == len(self.boundaries):
            return here(since(made, start))
        return select(
            made,
            self.boundaries[index],
            lambda: here(since(made, start)),
            lambda: self._from(index + 1, made),
        )

    def __repr__(self) -> str:
        return f"joined([{', '.join(map(format_part, self.schedules))}], {list(self.boundaries)})"


def joined(schedules: Sequence[Callable[[Any], Any]], boundaries: Sequence[int]) -> Joined:
    """Return several schedules in sequence. Each schedule counts steps from its own start.

    ``s(n) = s_i(n - b_i)`` for the last ``i`` with ``b_i <= n``, where ``b_0 = 0``, as in torch's
    SequentialLR with ``milestones = boundaries``.

    Args:
        schedules: of this package, or functions of the step count. If a step is traced or captured,
            all of them are computed at each step, and must consist of torch's operations.
        boundaries: increasing whole numbers >= 1, one less than schedules: the step counts at which
            the next schedules start.

    Returns:
        A schedule. It can be hashed, compared and pickled if all its parts can.

    Raises:
        TypeError, ValueError: an object that is not a schedule, or a value outside the bounds.

    Example::

        >>> from functional_optim import constant, cosine
        >>> held = joined([constant(0.1), cosine(0.1, to=0.01, steps=900)], [100])
        >>> held
        joined([constant(0.1), cosine(0.1, to=0.01, steps=900)], [100])
        >>> held(100.0), held(1000.0)
        (0.1, 0.01)
    """
    if not isinstance(schedules, (list, tuple)) or not schedules:
        raise TypeError(
            f"joined: schedules must be a list of schedules, got {format_value(schedules)}"
        )
    if not isinstance(boundaries, (list, tuple)) or len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"joined: boundaries must be a list of {len(schedules) - 1} whole numbers, one fewer "
            f"than there are schedules, got {format_value(boundaries)}"
        )
    least = 1
    for index, boundary in enumerate(boundaries):
        least = check_int(f"joined: boundaries[{index}]", boundary, least) + 1
    return Joined(
        tuple(check_schedule(f"joined: schedules[{i}]", one) for i, one in enumerate(schedules)),
        tuple(boundaries),
    )
