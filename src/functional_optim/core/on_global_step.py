"""A mark: this schedule counts the steps of the optimizer, and not of a leaf."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from functional_optim.core.schedule_value import ScheduleValue, function


@dataclass(frozen=True, repr=False)
class OnGlobalStep(ScheduleValue):
    """Made by :func:`on_global_step`."""

    schedule: Callable[[Any], Any]
    maker: ClassVar[str] = "on_global_step"

    def __call__(self, made: Any) -> Any:
        return self.schedule(made)


def on_global_step(schedule: Callable[[Any], Any]) -> OnGlobalStep:
    """Let a schedule count the steps of the whole optimizer, and not those of each leaf.

    Without it, a leaf that misses gradients falls behind: its schedule is called with the steps
    that this leaf has made. Behind a gate (``accumulate``, ``apply_if_finite``, ``sam``) the steps
    counted are those that the gate let through, not the calls. The values are those of
    ``schedule``: called, it hands the count on.

    Args:
        schedule: one of this package, or a function of the steps made.

    Returns:
        A schedule, whose ``schedule`` is the one given; to be hashed, compared and pickled if that
        is.

    Raises:
        TypeError: it cannot be called, or is marked already.

    Example::

        >>> from functional_optim import cosine
        >>> marked = on_global_step(cosine(0.1, steps=100))
        >>> marked, marked(100.0)
        (on_global_step(cosine(0.1, to=0.0, steps=100)), 0.0)
        >>> marked.schedule
        cosine(0.1, to=0.0, steps=100)
    """
    if isinstance(schedule, OnGlobalStep):
        raise TypeError(f"on_global_step: {schedule!r} is marked already; give it once")
    return OnGlobalStep(function("on_global_step: schedule", schedule))
