"""Detection of changed options of parameter groups: by identity, in C."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from functional_optim.core.hyper import is_fixed


class OptionCache:
    """Values of parameter groups when they were last read.

    Identity proves that a value is unchanged only if the value is immutable. So the cache is never
    current while a group has a mutable option, such as a tensor, a list or a schedule.

    Args:
        other_keys: keys of groups that are not options. Their values may be mutable.

    Example::

        >>> groups = [{"lr": 0.1, "params": []}]
        >>> cache = OptionCache(other_keys=("params",))
        >>> cache.is_current(groups)
        False
        >>> cache.store(groups)
        >>> cache.is_current(groups)
        True
        >>> groups[0]["lr"] = 0.2
        >>> cache.is_current(groups)
        False
    """

    def __init__(self, other_keys: Sequence[str] = ()) -> None:
        self._other_keys = other_keys
        self._keys: list[list[str]] = []
        self._values: list[Any] = []
        self._is_fixed = False

    def is_current(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if no option has changed since :meth:`store`."""
        return (
            self._is_fixed
            and [*map(list, groups)] == self._keys
            and all(map(is_, _values(groups), self._values))
        )

    def store(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Store the values of the groups."""
        self._keys, self._values = [*map(list, groups)], [*_values(groups)]
        options = ((key, value) for group in groups for key, value in group.items())
        self._is_fixed = all(key in self._other_keys or is_fixed(value) for key, value in options)

    def clear(self) -> None:
        """Forget all values."""
        self._is_fixed = False


def _values(groups: Sequence[Mapping[str, Any]]) -> "chain[Any]":
    return chain.from_iterable(group.values() for group in groups)
