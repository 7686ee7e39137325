"""Limit on the age of gradients: the number of steps since their snapshot was read."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

from functional_optim.remote.snapshot import Snapshot

WhenStale = Literal["refuse", "wait"]


class StaleError(RuntimeError):
    """Gradients that are too old. They were not applied."""


class GradientVersions(NamedTuple):
    """Versions of parameters that gradients were computed from, and the allowed age."""

    versions: Sequence[int | None] | None = None
    """The version of each parameter when it was read; None if unknown."""
    max_staleness: int | None = None
    """The largest staleness allowed; None for no limit."""


def age(versions: Sequence[int | None], current: Sequence[int]) -> int:
    """Return the largest number of steps that a parameter has made since it was read.

    ``versions`` has None for parameters that were not read.
    """
    pairs = zip(versions, current, strict=True)
    return max((now - read for read, now in pairs if read is not None), default=0)


def check_age(steps: int, limit: int | None) -> None:
    """Raise StaleError if gradients of this age are too old."""
    if limit is not None and steps > limit:
        raise StaleError(
            f"these gradients are {steps} steps old, and limit_staleness allows {limit}: read a "
            "new snapshot(), and compute them from that"
        )


class StalenessLimit:
    """Limit that lets a trainer read only if no gradient can become too old.

    A trainer may make one step after each read. Let k be the number of steps since the oldest
    snapshot in use was read, and n the number of snapshots in use. A trainer may read if

        k + n <= s,   or n = 0.

    Then the oldest snapshot is at most s steps old at its own step, even if all other trainers step
    first. With s = trainers - 1, trainers go in rounds. With a larger s, the fastest trainers are
    at most s steps ahead of the slowest, as in stale synchronous parallel training (Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013, section
    3). The paper compares the clocks of workers; this class compares versions, so that trainers may
    join and leave. A trainer that waits holds no snapshot, so no deadlock is possible.

    Example::

        >>> limit = StalenessLimit()
        >>> limit.set(1, "wait")
        >>> first, second = limit.enter(), limit.enter()  # a third call would wait
        >>> limit.leave(second)
        >>> limit.leave(first)
        >>> with limit.track_step(None):
        ...     pass
        >>> limit.waits
        0
    """

    def __init__(self) -> None:
        self.max_staleness: int | None = None
        """The largest staleness allowed; None for no limit."""
        self.waits = 0
        """The number of reads that had to wait."""
        self._waiting = False
        self._steps = 0
        self._tickets = 0
        self._in_use: dict[int, int] = {}
        # An RLock, because the garbage collector may call leave() in a thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())

    def set(self, max_staleness: Any, when_stale: str) -> None:
        """Change the limit. Raise TypeError or ValueError for invalid arguments."""
        most = max_staleness
        if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
            raise TypeError(f"max_staleness must be a number of steps or None, got {most!r}")
        if most is not None and most < 0:
            raise ValueError(f"max_staleness must be >= 0, or None for no limit, got {most}")
        if when_stale not in ("refuse", "wait"):
            raise ValueError(f"when_stale must be 'refuse' or 'wait', got {when_stale!r}")
        with self._changed:
            self.max_staleness, self._waiting = most, when_stale == "wait"
            self._changed.notify_all()

    def enter(self) -> int:
        """Count a snapshot as in use. Wait until the limit allows it.

        Returns:
            A ticket for :meth:`leave`.
        """
        with self._changed:
            if not self._is_free():
                self.waits += 1
                self._changed.wait_for(self._is_free)
            self._tickets += 1
            self._in_use[self._tickets] = self._steps
            return self._tickets

    @contextmanager
    def track_reading(self) -> Iterator[Callable[[], None]]:
        """Call :meth:`enter` before the ``with`` block reads a snapshot.

        Yields:
            A function that calls :meth:`leave`. If the block raises, it is called at once.
        """
        leave = partial(self.leave, self.enter())
        try:
            yield leave
        except BaseException:
            leave()
            raise

    def gradient_versions(
        self, snapshot: Snapshot | None, workers: Iterable[str]
    ) -> dict[str, GradientVersions]:
        """Return the versions and the limit for each worker; empty without snapshot and limit."""
        versions = {} if snapshot is None else snapshot.numbers
        limit = self.max_staleness
        if not versions and limit is None:
            return {}
        return {worker: GradientVersions(versions.get(worker), limit) for worker in workers}

    @contextmanager
    def track_step(self, snapshot: Snapshot | None) -> Iterator[None]:
        """Count the step that the ``with`` block makes, if it succeeds.

        The snapshot of the gradients is given back before the step, and closed after it. A step
        without a snapshot waits like a reader.
        """
        ticket = self.enter() if snapshot is None else None
        try:
            if snapshot is not None:
                snapshot.give_back()
            yield
            with self._changed:
                self._steps += 1
        finally:
            if snapshot is not None:
                snapshot.close()
            if ticket is not None:
                self.leave(ticket)

    def leave(self, ticket: int) -> None:
        with self._changed:
            self._in_use.pop(ticket, None)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        """Return True if one more trainer may read."""
        if self.max_staleness is None or not self._waiting or not self._in_use:
            return True
        behind = self._steps - min(self._in_use.values())
        return behind + len(self._in_use) <= self.max_staleness
