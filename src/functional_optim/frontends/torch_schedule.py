"""A schedule among the options of a parameter group, where schedulers of torch expect a number."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim.core.hyper import shown

_SCHEDULERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
"""The modules with torch's schedulers."""


class GroupSchedule:
    """A schedule as it stands in a parameter group: called as ever, and no number.

    A scheduler that multiplies what it finds in a group is told why it cannot.

    Args:
        name: of the option.
        schedule: the function.

    Example::

        >>> lr = GroupSchedule("lr", lambda made: 0.1 * 0.5**made)
        >>> lr(1.0)
        0.05
        >>> lr * 0.5
        Traceback (most recent call last):
            ...
        TypeError: lr is the schedule <lambda>, a function of the steps that a parameter has made, \
and no number; an lr_scheduler of torch computes with a number: keep one of the two (make the \
optimizer with a number for lr, or leave out the scheduler)
    """

    __slots__ = ("name", "schedule")

    def __init__(self, name: str, schedule: Any) -> None:
        self.name = name
        self.schedule = schedule

    def __call__(self, made: Any) -> Any:
        return self.schedule(made)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupSchedule, (self.name, self.schedule)

    @property
    def __name__(self) -> str:
        return shown(self.schedule)

    def __repr__(self) -> str:
        return repr(self.schedule)

    def __eq__(self, other: object) -> bool:
        return bool(
            self.schedule == (other.schedule if isinstance(other, GroupSchedule) else other)
        )

    def __hash__(self) -> int:
        return hash(self.schedule)

    def no_number(self, *_: Any) -> NoReturn:
        """Say why nothing can be computed with it.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self.name} is the schedule {shown(self.schedule)}, a function of the steps that a "
            "parameter has made, and no number; an lr_scheduler of torch computes with a number: "
            f"keep one of the two (make the optimizer with a number for {self.name}, or leave out "
            "the scheduler)"
        )

    __float__ = __int__ = __neg__ = __abs__ = no_number
    __add__ = __radd__ = __sub__ = __rsub__ = no_number
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = no_number
    __lt__ = __le__ = __gt__ = __ge__ = no_number


class ScheduledGroup(dict[str, Any]):
    """A parameter group with a schedule: a dict that torch's lr_schedulers cannot be made for.

    Every scheduler of torch reads the learning rate of each group, or writes into the group, when
    it is constructed. Some of them, such as ``OneCycleLR``, compute with nothing that they read and
    would replace the schedule without a word; ``ReduceLROnPlateau`` would fail at the first
    plateau. So a group with a schedule refuses to be used from torch's scheduler modules.

    Example::

        >>> from functional_optim import TorchOptimizer, sgd
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimizer = TorchOptimizer([weight], sgd(lr=lambda made: 0.1 * 0.5**made))
        >>> optimizer.param_groups[0]["lr"](1.0)
        0.05
        >>> torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        Traceback (most recent call last):
            ...
        TypeError: lr is the schedule <lambda>, a function of the steps that a parameter has made, \
and no number; an lr_scheduler of torch computes with a number: keep one of the two (make the \
optimizer with a number for lr, or leave out the scheduler)
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
    """Return True if an option is a schedule, or a tuple with a schedule for one of its numbers."""
    if isinstance(value, tuple):
        return any(map(is_scheduled, value))
    return callable(value) and not isinstance(value, Tensor)


def _is_called_by_scheduler() -> bool:
    """Return True if the caller of the calling method is a scheduler of torch."""
    return sys._getframe(2).f_globals.get("__name__") in _SCHEDULERS  # noqa: SLF001  documented


def _refuse(name: str, value: Any) -> NoReturn:
    schedules = value if isinstance(value, tuple) else (value,)
    found = next(filter(is_scheduled, schedules))
    told = found if isinstance(found, GroupSchedule) else GroupSchedule(name, found)
    told.no_number()


def guarded(group: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a parameter group that tells torch's lr_schedulers about its schedules.

    Args:
        group: of parameters; the schedules in it are replaced by a :class:`GroupSchedule` each.
        names: the options that may be schedules.

    Returns:
        The group itself, or a :class:`ScheduledGroup` with its items if it has a schedule.
    """
    for name in names:
        value = group.get(name)
        if callable(value) and not isinstance(value, (Tensor, GroupSchedule)):
            group[name] = GroupSchedule(name, value)
    options = (value for key, value in group.items() if key not in ("params", "param_names"))
    if isinstance(group, ScheduledGroup) or not any(map(is_scheduled, options)):
        return group
    return ScheduledGroup(group)


def with_schedules(
    loaded: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Groups that are loaded, with the schedules of now where none was saved.

    The checkpoints of ZeroRedundancyOptimizer have none: they are functions, and steps are counted.

    Args:
        loaded: as they were saved.
        groups: of the optimizer, as they are.
    """
    own = [{k: v for k, v in one.items() if isinstance(v, GroupSchedule)} for one in groups]
    own += [{}] * (len(loaded) - len(own))  # torch refuses another number of groups
    return [{**kept, **one} for kept, one in zip(own, loaded, strict=False)]


def refuse_schedulers(group: Any) -> None:
    """Refuse a group with a schedule, to which a scheduler that is not torch's was attached.

    Raises:
        TypeError: names both.
    """
    started = group.get("initial_lr")  # written there by most schedulers
    if isinstance(started, GroupSchedule) and isinstance(group.get("lr"), GroupSchedule):
        started.no_number()


# It holds a schedule, which is read only where that may be.
torch.serialization.add_safe_globals([GroupSchedule])
