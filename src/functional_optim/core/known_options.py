"""Check that the options of parameter groups did not change: by identity, in C."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from functional_optim.core.hyper import is_fixed


class KnownOptions:
    """Values of parameter groups when they were last read.

    Only values that cannot change inside are known again by identity: while a group has another
    one, such as a tensor, a list or a schedule, groups are never known again.

    Example::

        >>> groups = [{"lr": 0.1, "params": []}]
        >>> known = KnownOptions(beside=("params",))
        >>> known.hold(groups)
        False
        >>> known.learn(groups)
        >>> known.hold(groups)
        True
        >>> groups[0]["lr"] = 0.2
        >>> known.hold(groups)
        False
    """

    def __init__(self, beside: Sequence[str] = ()) -> None:
        self._beside = beside
        self._keys: list[list[str]] = []
        self._values: list[Any] = []
        self._is_fixed = False

    def hold(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if groups hold the same, and nothing that may have changed inside."""
        return (
            self._is_fixed
            and [*map(list, groups)] == self._keys
            and all(map(is_, _values(groups), self._values))
        )

    def learn(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """They are what is known from now on."""
        self._keys, self._values = [*map(list, groups)], [*_values(groups)]
        options = ((key, value) for group in groups for key, value in group.items())
        self._is_fixed = all(key in self._beside or is_fixed(value) for key, value in options)

    def forget(self) -> None:
        """Nothing is known."""
        self._is_fixed = False


def _values(groups: Sequence[Mapping[str, Any]]) -> "chain[Any]":
    return chain.from_iterable(group.values() for group in groups)
