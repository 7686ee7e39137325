"""Parameter groups of one rank's shard, with the options of the whole optimizer's groups."""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.engine.messages import format_value
from functional_optim.engine.options import NOT_OPTIONS, options_of


class OwnedGroup(MutableMapping[str, Any]):
    """A rank's part of a parameter group: its own parameters, and the options of the whole group.

    Options are stored in the group of the whole optimizer only: writes to them are passed on.
    There are no parameter names, because torch requires names in all groups or in none, and an
    empty group has no names.

    Args:
        groups: the parameter groups of the whole optimizer.
        number: of the group among them.
        params: the parameters and ranges that the rank owns.

    Example::

        >>> whole = [{"params": ["a", "b"], "lr": 0.1}]
        >>> own = OwnedGroup(whole, 0, ["b"])
        >>> whole[0]["lr"] = 0.2
        >>> own["momentum"] = 0.9
        >>> dict(own), whole[0]["momentum"]
        ({'params': ['b'], 'lr': 0.2, 'momentum': 0.9}, 0.9)
    """

    __slots__ = ("_groups", "_number", "_params")

    def __init__(
        self, groups: Sequence[MutableMapping[str, Any]], number: int, params: list[Any]
    ) -> None:
        self._groups, self._number, self._params = groups, number, params

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            return self._params
        if name in NOT_OPTIONS:
            raise KeyError(name)
        return self._groups[self._number][name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            self._params[:] = value
        else:
            self._groups[self._number][name] = value

    def __delitem__(self, name: str) -> None:
        if name in NOT_OPTIONS:
            raise KeyError(
                f"{name!r} of a parameter group cannot be deleted: groups of "
                "ZeroRedundancyOptimizer are fixed when they are added"
            )
        del self._groups[self._number][name]

    def __iter__(self) -> Iterator[str]:
        yield "params"
        yield from (name for name in self._groups[self._number] if name not in NOT_OPTIONS)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


def foreign_optimizer(
    optimizer_class: Any,
    groups: Sequence[MutableMapping[str, Any]],
    params: Sequence[list[Tensor]],
    defaults: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return an instance of a class without functional equivalent, over whole parameters.

    ``params`` has this rank's parameters of each group. Options that the class adds are written to
    the groups and to ``defaults``, in which some schedulers of torch look for options.
    """
    own = [
        {**options_of(group), "params": list(tensors)}
        for group, tensors in zip(groups, params, strict=True)
    ]
    made = optimizer_class(own, **defaults)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer_class must make a torch.optim.Optimizer of parameter groups, got "
            f"{format_value(made)} from {format_value(optimizer_class)}"
        )
    defaults.update({**made.defaults, **defaults})
    for number in range(len(groups)):
        _share_options(made, groups, number)
    return made


def add_foreign_group(
    optim: torch.optim.Optimizer,
    groups: Sequence[MutableMapping[str, Any]],
    number: int,
    params: list[Tensor],
) -> None:
    """Add a rank's part of a group to an optimizer of :func:`foreign_optimizer`."""
    optim.add_param_group({**options_of(groups[number]), "params": params})
    _share_options(optim, groups, number)


def _share_options(
    optim: torch.optim.Optimizer, groups: Sequence[MutableMapping[str, Any]], number: int
) -> None:
    """Replace a group of an optimizer by one that shares the options of the whole group."""
    own: list[Any] = optim.param_groups
    groups[number].update(options_of(own[number]))
    own[number] = OwnedGroup(groups, number, own[number]["params"])
