"""From one number to another in so many steps, each schedule by a way of its own."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from functional_optim.core.schedule_value import Anneal, ScheduleValue, finite, whole
from functional_optim.schedules.arithmetic import ramp


@dataclass(frozen=True, repr=False)
class Ramp(ScheduleValue):
    """Schedule that ``linear`` and ``cosine`` make."""

    start: float
    to: float
    steps: int
    anneal: ClassVar[Anneal]
    """The way from ``start`` to ``to``."""

    def __call__(self, made: Any) -> Any:
        return ramp(made, self.start, self.to, self.steps, self.anneal)

    @classmethod
    def checked(cls, start: Any, to: Any, steps: Any) -> Self:
        """Check the arguments of a caller, and make a schedule of them.

        Raises:
            TypeError, ValueError: a ``start`` or ``to`` that is no finite number, or ``steps`` that
                are no whole number >= 1.
        """
        name = cls.maker
        return cls(
            finite(f"{name}: start", start),
            finite(f"{name}: to", to),
            whole(f"{name}: steps", steps, 1),
        )
