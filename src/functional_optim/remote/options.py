"""Options of parameter groups on their way to workers: they travel when they have changed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functional_optim.core.known_options import KnownOptions
from functional_optim.frontends.torch_groups import NOT_OPTIONS, options_of


class Numbered(NamedTuple):
    """The options of a worker's groups, and their version."""

    version: int
    groups: list[dict[str, Any]]


Sent = int | Numbered
"""What a worker is sent: the version alone, where it has acknowledged that."""


class MissingOptionsError(LookupError):
    """A worker was sent the version alone of options that it does not have; nothing is changed."""


class AcknowledgedOptions:
    """The options of all groups, as workers have acknowledged them.

    A version is one set of values. Values that may change inside, such as a tensor, are taken for
    new ones each time. Calls are made by one thread at a time, but for :meth:`acknowledge`.

    Args:
        numbers: for each worker, which groups have parameters there.

    Example::

        >>> options = AcknowledgedOptions({"ps0": [0]})
        >>> group = {"params": [], "lr": 0.1}
        >>> first = options.now([group])["ps0"]
        >>> first.groups
        [{'lr': 0.1}]
        >>> options.brief("ps0", first).groups
        [{'lr': 0.1}]
        >>> options.acknowledge("ps0", first)
        >>> options.brief("ps0", options.now([group])["ps0"])
        1
        >>> group["lr"] = 0.5
        >>> options.brief("ps0", options.now([group])["ps0"]).groups
        [{'lr': 0.5}]
    """

    def __init__(self, numbers: Mapping[str, Sequence[int]]) -> None:
        self._numbers = numbers
        self._version = 0
        self._known = KnownOptions(beside=NOT_OPTIONS)
        self._current: dict[str, Numbered] = {}
        self._acknowledged = dict.fromkeys(numbers, 0)

    def now(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Numbered]:
        """The options of each worker's groups, as they are now."""
        if self._known.hold(groups):
            return self._current
        self._known.learn(groups)
        every = [options_of(group) for group in groups]
        self._version += 1
        self._current = {
            worker: Numbered(self._version, [every[number] for number in own])
            for worker, own in self._numbers.items()
        }
        return self._current

    def brief(self, worker: str, options: Numbered) -> Sent:
        """The version alone, where the worker has acknowledged it."""
        version = options.version
        return version if self._acknowledged[worker] == version else options

    def acknowledge(self, worker: str, options: Numbered) -> None:
        """A worker has made a call with these options."""
        self._acknowledged[worker] = max(self._acknowledged[worker], options.version)

    def renew(self) -> None:
        """Workers were given other options by a state dict: the next ones are a new version."""
        self._known.forget()
