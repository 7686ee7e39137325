"""Schedules that count the steps of the optimizer, and not the steps of a leaf."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from functional_optim.core.on_global_step import OnGlobalStep


def has_global_schedule(hypers: Iterable[Any]) -> bool:
    """Return True if a value among some hyper-parameters is such a schedule."""
    return any(
        _marked(value) is not None
        for hyper in hypers
        for one in hyper
        for value in (one if isinstance(one, tuple) else (one,))
    )


def _marked(value: Any) -> OnGlobalStep | None:
    """The schedule that a value is, or that stands for it in a parameter group."""
    if type(value) in {int, float}:  # torch.compile knows no attribute of one that changes
        return None
    found = value if isinstance(value, OnGlobalStep) else getattr(value, "schedule", None)
    return found if isinstance(found, OnGlobalStep) else None


def at_global_step(hyper: Any, step: Any) -> Any:
    """A Hyper whose global schedules are at a step, whatever the step of a leaf is.

    Args:
        hyper: before schedules are evaluated.
        step: of the optimizer, from 1.
    """
    if not has_global_schedule([hyper]):
        return hyper
    return type(hyper)(*(_fixed(value, step - 1) for value in hyper))


def _fixed(value: Any, made: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_fixed(one, made) for one in value)
    marked = _marked(value)
    return value if marked is None else partial(_at, marked.schedule, made)


def _at(schedule: Callable[[Any], Any], made: Any, _: Any) -> Any:
    """The schedule's value; what a leaf has made is of no account."""
    return schedule(made)
