"""Limit on the age of gradients: the steps between their snapshot and their own step."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

WhenStale = Literal["refuse", "wait"]


class StaleError(RuntimeError):
    """Gradients of a version that is too old; they were not applied."""


class GradientVersions(NamedTuple):
    """Versions of gradients, and their allowed age."""

    numbers: Sequence[int | None] | None = None
    """The step of each parameter at which it was read; None if nobody knows."""
    most: int | None = None
    """The largest staleness allowed; None for any."""


def age(numbers: Sequence[int | None], now: Sequence[int]) -> int:
    """The most steps that any parameter has made since it was read.

    Args:
        numbers: the step of each parameter at which it was read; None for those that were not.
        now: the step that each is at.

    Example::

        >>> age([2, None, 3], [2, 9, 5])
        2
    """
    pairs = zip(numbers, now, strict=True)
    return max((own - one for one, own in pairs if one is not None), default=0)


def check_age(found: int, most: int | None) -> None:
    """Gradients of this age may be applied.

    Raises:
        StaleError: they are older than that.
    """
    if most is not None and found > most:
        raise StaleError(
            f"these gradients are {found} steps old, and limit_staleness allows {most}: read a new "
            "snapshot(), and compute them from that"
        )


class Open(Protocol):
    """A snapshot in use."""

    @property
    def numbers(self) -> Mapping[str, Sequence[int | None]]:
        """By worker, the step of each parameter at which it was read."""

    def give_back(self) -> None:
        """Let its memory be overwritten."""

    def close(self) -> None:
        """Leave."""


class StalenessLimit:
    """Lets trainers read only when no gradient can become older than is allowed by it.

    A reader may make one step until it reads again. Let k steps have been made since the oldest
    snapshot in use was read, and n snapshots be in use. A further reader is let in if

        k + n <= s,   or n = 0,

    for then the oldest is at most s steps old when its step comes, even if all others, the new one
    among them, come first. With s = trainers - 1, trainers go in rounds; with more, the fastest are
    ahead of the slowest by as many steps, as in stale synchronous parallel training (Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013,
    section 3). There a worker's own clock is compared with the slowest's; here it is
    versions, so that trainers may come and go. Who waits holds nothing, so no two wait for each
    other.

    Example::

        >>> limit = StalenessLimit()
        >>> limit.set(1, "wait")
        >>> first, second = limit.enter(), limit.enter()  # a third one would wait now
        >>> limit.leave(second)
        >>> limit.leave(first)
        >>> with limit.one_step(None):
        ...     pass
        >>> limit.waits
        0
    """

    def __init__(self) -> None:
        self.most: int | None = None
        """The largest staleness allowed."""
        self.waits = 0
        """Readers that had to wait."""
        self._waiting = False
        self._steps = 0
        self._tickets = 0
        self._in_use: dict[int, int] = {}
        # A snapshot that is collected leaves in whatever thread that happens: an RLock.
        self._changed = threading.Condition(threading.RLock())

    def set(self, most: Any, when_stale: str) -> None:
        """Change the limit.

        Raises:
            TypeError, ValueError: it is no number of steps; ``when_stale`` is neither of the two.
        """
        if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
            raise TypeError(f"max_staleness must be a number of steps or None, got {most!r}")
        if most is not None and most < 0:
            raise ValueError(f"max_staleness must be >= 0, or None for no limit, got {most}")
        if when_stale not in ("refuse", "wait"):
            raise ValueError(f"when_stale must be 'refuse' or 'wait', got {when_stale!r}")
        with self._changed:
            self.most, self._waiting = most, when_stale == "wait"
            self._changed.notify_all()

    def enter(self) -> int:
        """Begin to read; it waits until that is allowed.

        Returns:
            A ticket, for :meth:`leave`.
        """
        with self._changed:
            if not self._is_free():
                self.waits += 1
                self._changed.wait_for(self._is_free)
            self._tickets += 1
            self._in_use[self._tickets] = self._steps
            return self._tickets

    @contextmanager
    def reading(self) -> Iterator[Callable[[], None]]:
        """While a snapshot is read, begun as by :meth:`enter`.

        Yields:
            What ends the use of the snapshot; where reading fails, it was called.
        """
        leave = partial(self.leave, self.enter())
        try:
            yield leave
        except BaseException:
            leave()
            raise

    def taken(self, snapshot: "Open | None", workers: Iterable[str]) -> dict[str, GradientVersions]:
        """Return what each worker must know of the age of gradients; empty if no limit is set."""
        numbers = {} if snapshot is None else snapshot.numbers
        if not numbers and self.most is None:
            return {}
        return {worker: GradientVersions(numbers.get(worker), self.most) for worker in workers}

    @contextmanager
    def one_step(self, snapshot: "Open | None") -> Iterator[None]:
        """While a step is made, which is counted if it succeeds.

        Args:
            snapshot: from which its gradients are; it is given back, and left at the end. A step
                without one comes in like a reader, where those have to wait.
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
        """A snapshot is no longer in use: stepped, or given up."""
        with self._changed:
            self._in_use.pop(ticket, None)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        """Return True if one more may read."""
        if self.most is None or not self._waiting or not self._in_use:
            return True
        behind = self._steps - min(self._in_use.values())
        return behind + len(self._in_use) <= self.most
