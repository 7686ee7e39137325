"""FixedGroups: check that parameters stay in the parameter groups in which they were given."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

_PARAMS = itemgetter("params")  # without a Python call for each group

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, as torch.optim keeps them."""


class FixedGroups:
    """Check that parameter groups have the parameters that an optimizer was made with."""

    def __init__(self, params: Mapping[str, Any], groups: Groups, *, fixed: str, ways: str) -> None:
        self._fixed, self._ways = fixed, ways
        self._paths = {id(param): path for path, param in params.items()}
        self._numbers = _group_numbers(groups)
        self._listed = _list_params(groups)

    def check(self, groups: Groups) -> None:
        """Raise ValueError if a parameter was added, removed, or moved to another group."""
        sizes, params = _list_params(groups)
        if sizes == self._listed[0] and all(map(is_, params, self._listed[1])):
            return
        numbers = _group_numbers(groups)
        every = {**self._numbers, **numbers}
        changed = [key for key in every if self._numbers.get(key) != numbers.get(key)]
        if changed:
            before, now = self._numbers.get(changed[0]), numbers.get(changed[0])
            path = self._paths.get(changed[0])
            raise ValueError(
                f"{'a new parameter' if path is None else f'the parameter {path!r}'} was in "
                f"{_group_name(before)} when {self._fixed} was made, and is in {_group_name(now)} "
                "now. Who steps which parameter, and by the options of which group, is fixed, so "
                f"put 'params' back. {self._ways}"
            )
        self._listed = sizes, params  # in another order


def _group_name(number: int | None) -> str:
    return "no group" if number is None else f"param_groups[{number}]"


def _group_numbers(groups: Groups) -> dict[int, int]:
    """Return the number of each parameter's group, by the id of the parameter."""
    return {id(param): number for number, group in enumerate(groups) for param in group["params"]}


def _list_params(groups: Groups) -> tuple[list[int], list[Any]]:
    """Return the number of parameters of each group, and all parameters."""
    lists = list(map(_PARAMS, groups))
    return list(map(len, lists)), list(chain.from_iterable(lists))
