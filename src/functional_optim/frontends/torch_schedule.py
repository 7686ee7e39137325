"""Schedules in parameter groups, which torch's lr_schedulers must not treat as numbers."""

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim.core.hyper import format_hyper

_SCHEDULERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
"""The modules of torch's schedulers."""


class GroupSchedule(dict[str, Any]):
    """A schedule in a parameter group. It can be called, and arithmetic raises an error.

    A scheduler that multiplies the value gets an error with the reason.

    It is a dict without items, because ``torch.distributed.checkpoint`` saves and loads the items
    of a dict, and every other value of a group. Not every function can be saved, and a checkpoint
    of another optimizer lacks the key. So such a checkpoint never has a schedule.
    """

    __slots__ = ("name", "schedule")

    def __init__(self, name: str, schedule: Any) -> None:
        super().__init__()
        self.name = name
        self.schedule = schedule

    def __call__(self, made: Any) -> Any:
        return self.schedule(made)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupSchedule, (self.name, self.schedule)

    @property
    def __name__(self) -> str:
        return format_hyper(self.schedule)

    def __repr__(self) -> str:
        return repr(self.schedule)

    def __eq__(self, other: object) -> bool:
        return bool(
            self.schedule == (other.schedule if isinstance(other, GroupSchedule) else other)
        )

    def __hash__(self) -> int:  # type: ignore[override]  # it has no items that may change
        return hash(self.schedule)

    def refuse_arithmetic(self, *_: Any) -> NoReturn:
        """Raise TypeError: a schedule is not a number."""
        raise TypeError(
            f"{self.name} is the schedule {format_hyper(self.schedule)}, a function of the steps "
            "that a parameter has made, and no number; an lr_scheduler of torch computes with a "
            f"number: keep one of the two (make the optimizer with a number for {self.name}, or "
            "leave out the scheduler)"
        )

    __float__ = __int__ = __neg__ = __abs__ = refuse_arithmetic
    __add__ = __radd__ = __sub__ = __rsub__ = refuse_arithmetic
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = refuse_arithmetic


class ScheduledGroup(dict[str, Any]):
    """A parameter group with a schedule, which torch's lr_schedulers cannot use.

    The constructor of each torch scheduler reads the learning rate of each group, or writes to the
    group. Some schedulers, such as ``OneCycleLR``, would replace the schedule silently.
    ``ReduceLROnPlateau`` would fail only at the first plateau. So a group with a schedule raises an
    error if code in torch's scheduler modules reads or writes it.
    """

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if is_scheduled(value) and _is_called_by_scheduler():
            _refuse(name, value)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if _is_called_by_scheduler():
            for key in ("lr", name):
                if is_scheduled(self.get(key)):
                    _refuse(key, self.get(key))
        super().__setitem__(name, value)


def is_scheduled(value: Any) -> bool:
    """Return True if an option is a schedule, or a tuple that contains a schedule."""
    if isinstance(value, tuple):
        return any(map(is_scheduled, value))
    return callable(value) and not isinstance(value, Tensor)


def _is_called_by_scheduler() -> bool:
    """Return True if the method that calls this function is called by a torch scheduler."""
    return sys._getframe(2).f_globals.get("__name__") in _SCHEDULERS  # noqa: SLF001  documented


def _refuse(name: str, value: Any) -> NoReturn:
    schedules = value if isinstance(value, tuple) else (value,)
    found = next(filter(is_scheduled, schedules))
    own = found if isinstance(found, GroupSchedule) else GroupSchedule(name, found)
    own.refuse_arithmetic()


def guard_schedules(group: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a parameter group whose schedules raise an error in torch's lr_schedulers."""
    for name in names:
        value = group.get(name)
        if callable(value) and not isinstance(value, (Tensor, GroupSchedule)):
            group[name] = GroupSchedule(name, value)
    options = (value for key, value in group.items() if key not in ("params", "param_names"))
    if isinstance(group, ScheduledGroup) or not any(map(is_scheduled, options)):
        return group
    return ScheduledGroup(group)


def refuse_schedulers(group: Any) -> None:
    """Raise TypeError if a group has a schedule, and a scheduler from outside of torch uses it."""
    initial = group.get("initial_lr")  # most schedulers write this entry
    if isinstance(initial, GroupSchedule) and isinstance(group.get("lr"), GroupSchedule):
        initial.refuse_arithmetic()


# torch.load(weights_only=True) still refuses a schedule that is not on its list of safe globals.
torch.serialization.add_safe_globals([GroupSchedule])
