"""A schedule among the options of a parameter group, where schedulers of torch expect a number."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim.core.hyper import shown


class GroupSchedule:
    """A schedule as it stands in a parameter group: called as ever, and no number.

    torch's lr_schedulers multiply what they find in a group. Here they are told why they cannot.

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


def guard_schedules(group: dict[str, Any], names: Iterable[str]) -> None:
    """Put a :class:`GroupSchedule` in the place of every schedule of a group.

    Args:
        group: of parameters.
        names: the options that may be schedules.
    """
    for name in names:
        value = group.get(name)
        if callable(value) and not isinstance(value, (Tensor, GroupSchedule)):
            group[name] = GroupSchedule(name, value)


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
    """Refuse a group with a schedule, to which an lr_scheduler was attached.

    Raises:
        TypeError: names both.
    """
    started = group.get("initial_lr")  # written there by every scheduler
    if isinstance(started, GroupSchedule) and isinstance(group.get("lr"), GroupSchedule):
        started.no_number()


# It holds a schedule, which is read only where that may be.
torch.serialization.add_safe_globals([GroupSchedule])
