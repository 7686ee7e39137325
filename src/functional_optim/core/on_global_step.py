"""Schedules of the optimizer's step count, in place of the step counts of leaves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from functional_optim.core.schedule_value import ScheduleValue, check_schedule


@dataclass(frozen=True, repr=False)
class OnGlobalStep(ScheduleValue):
    """Schedule of the optimizer's step count. Made by :func:`on_global_step`."""

    schedule: Callable[[Any], Any]
    maker: ClassVar[str] = "on_global_step"

    def __call__(self, made: Any) -> Any:
        return self.schedule(made)


def on_global_step(schedule: Callable[[Any], Any]) -> OnGlobalStep:
    """Call a schedule with the number of steps of the whole optimizer, not of each leaf.

    Otherwise a schedule gets the number of steps of the leaf, which is lower after missing
    gradients. After a gate (``accumulate``, ``apply_if_finite``, ``sam``), only steps that the gate
    lets through are counted.

    Args:
        schedule: a schedule of this package, or a function of the number of steps made.

    Returns:
        A schedule with the same values. Its attribute ``schedule`` is the argument. It can be
        hashed, compared and pickled if the argument can.

    Raises:
        TypeError: the schedule is not callable, or is already on the global step.

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
    return OnGlobalStep(check_schedule("on_global_step: schedule", schedule))


def has_global_schedule(hypers: Iterable[Any]) -> bool:
    """Return True if a hyper-parameter is a schedule on the global step."""
    return any(
        global_schedule(value) is not None
        for hyper in hypers
        for one in hyper
        for value in (one if isinstance(one, tuple) else (one,))
    )


def global_schedule(value: Any) -> OnGlobalStep | None:
    """Return the schedule on the global step that a value is, or has as ``schedule``; else None."""
    if type(value) in {int, float}:  # torch.compile refuses getattr on a number that changes
        return None
    found = value if isinstance(value, OnGlobalStep) else getattr(value, "schedule", None)
    return found if isinstance(found, OnGlobalStep) else None


def require_counted(label: str, value: Any) -> None:
    """Raise ValueError for a schedule on the global step, where no state counts these steps."""
    if global_schedule(value) is not None:
        raise ValueError(
            f"{label} is {value!r}, and this optimizer does not count its steps, since it was made "
            "without such a schedule: make the optimizer with it, as in "
            "sgd(lr=on_global_step(...)), or leave out on_global_step, to count the steps of each "
            "parameter"
        )


def at_global_step(hyper: Any, step: Any) -> Any:
    """Return a Hyper whose global schedules have the value of optimizer step ``step`` (from 1)."""
    if not has_global_schedule([hyper]):
        return hyper
    return type(hyper)(*(_at_step(value, step - 1) for value in hyper))


def _at_step(value: Any, step: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_at_step(one, step) for one in value)
    found = global_schedule(value)
    return value if found is None else partial(_call_at, found.schedule, step)


def _call_at(schedule: Callable[[Any], Any], step: Any, _leaf_step: Any) -> Any:
    return schedule(step)
