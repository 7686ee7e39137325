"""Options of parameter groups, sent to workers only if they have changed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functional_optim.engine.options import are_unchanged, options_of


class VersionedOptions(NamedTuple):
    """Options of a worker's groups, and their version."""

    version: int
    groups: list[dict[str, Any]]


Sent = int | VersionedOptions
"""The options, or their version alone if the worker has acknowledged that version."""


class MissingOptionsError(LookupError):
    """Error of a worker that lacks the options of a version. Nothing has changed."""


class OptionsSender:
    """Options of all groups, and the version that each worker has acknowledged.

    A version is one set of values. Values that may be changed in place, such as tensors, always
    count as new. All methods except :meth:`acknowledge` are called by one thread at a time.
    ``numbers`` has the indices of each worker's groups.

    Example::

        >>> options = OptionsSender({"ps0": [0]})
        >>> group = {"params": [], "lr": 0.1}
        >>> first = options.current([group])["ps0"]
        >>> first.groups
        [{'lr': 0.1}]
        >>> options.encode("ps0", first).groups
        [{'lr': 0.1}]
        >>> options.acknowledge("ps0", first)
        >>> options.encode("ps0", options.current([group])["ps0"])
        1
        >>> group["lr"] = 0.5
        >>> options.encode("ps0", options.current([group])["ps0"]).groups
        [{'lr': 0.5}]
    """

    def __init__(self, numbers: Mapping[str, Sequence[int]]) -> None:
        self._numbers = numbers
        self._version = 0
        self._known: list[tuple[str, Any]] | None = None
        """Names and values of the current version; None if the next call starts a new version."""
        self._current: dict[str, VersionedOptions] = {}
        self._acknowledged = dict.fromkeys(numbers, 0)

    def current(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, VersionedOptions]:
        """Return the current options of each worker's groups."""
        every = [options_of(group) for group in groups]
        known, now = self._known, [item for group in every for item in group.items()]
        if known is not None and len(known) == len(now) and are_unchanged(known, now):
            return self._current
        self._known = now
        self._version += 1
        self._current = {
            worker: VersionedOptions(self._version, [every[number] for number in own])
            for worker, own in self._numbers.items()
        }
        return self._current

    def encode(self, worker: str, options: VersionedOptions) -> Sent:
        """Return the version alone if the worker has acknowledged it, else the options."""
        version = options.version
        return version if self._acknowledged[worker] == version else options

    def acknowledge(self, worker: str, options: VersionedOptions) -> None:
        """Record that a worker has made a call with these options."""
        self._acknowledged[worker] = max(self._acknowledged[worker], options.version)

    def invalidate(self) -> None:
        """Start a new version: a state dict has changed the options of the workers."""
        self._known = None
