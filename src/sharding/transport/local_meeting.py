"""Meeting of the ranks of one process: an operation is done when all of its ranks have come."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from sharding.transport.protocol import TransportError

Act = Callable[[Mapping[int, Any]], None]
"""From what each rank gave, by its number in the group, what the operation does."""


class Meeting:
    """Operation of some ranks of a group.

    Args:
        what: they do together, for errors.
        ranks: the ranks of the group, by their numbers in the world.
        members: those that take part, by their numbers in the group.
    """

    def __init__(self, what: str, ranks: Sequence[int], members: Sequence[int]) -> None:
        self.what = what
        self.given: dict[int, Any] = {}
        """What those who came have brought, by their numbers in the group."""
        self.error: str | None = None
        self.ranks = ranks
        self.members = members
        self.ended = False
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], object]] = []

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have not come, by their numbers in the group."""
        return [rank for rank in self.members if rank not in self.given]

    def named(self, rank: int) -> str:
        """A rank, as errors name it."""
        return f"group rank {rank} (global rank {self.ranks[rank]})"

    def wait(self, seconds: float | None = None) -> Mapping[int, Any]:
        """Wait for all ranks, and return their values.

        Args:
            seconds: that this one waits; by default for as long as the world goes on.

        Raises:
            RuntimeError: they were not, in time.
            TransportError: one does not come.
        """
        if not self._event.wait(seconds):
            raise RuntimeError(f"{self.what}: timed out after {seconds} s")
        if self.error is not None:
            raise TransportError(self.error)
        return self.given

    def then(self, call: Callable[[], object]) -> None:
        """Call something when the meeting has ended, well or not; at once, if it has."""
        with self._lock:
            if not self.ended:
                self._then.append(call)
                return
        call()

    def end(self) -> list[Callable[[], object]]:
        """Let go of all who wait; returns what is to be called then."""
        with self._lock:
            self.ended = True
            self._event.set()
            calls, self._then = self._then, []
        return calls


class Board:
    """All meetings of a world, and which ranks will come to none any more.

    Args:
        seconds: that ranks are given to come to an operation, for errors.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.news = threading.Condition(threading.RLock())
        """Held wherever something changes; whoever watches the world waits for it."""
        self.arrivals = 0
        """How often a rank has come to an operation: while this rises, the world goes on."""
        self.gone: dict[int, str] = {}
        """By its number in the world, why a rank comes to nothing any more."""
        self._open: dict[Hashable, Meeting] = {}

    def come(self, key: Hashable, rank: int, given: Any, meeting: Meeting, act: Act) -> Meeting:
        """Come to an operation, and do it, if all others are there.

        Args:
            key: of the operation, the same on all its ranks.
            rank: who comes, by its number in the group.
            given: what it brings.
            meeting: a new one, for the first that comes.
            act: what is done once, when the last has come.

        Returns:
            The meeting of all.
        """
        calls: list[Callable[[], object]] = []
        with self.news:
            found = self._open.setdefault(key, meeting)
            self.arrivals += 1
            found.given[rank] = given
            if found.what != meeting.what:
                first = next(iter(found.given))
                calls = self._fail(
                    found,
                    f"ranks are out of step: {found.named(first)} is at {found.what}, and "
                    f"{found.named(rank)} at {meeting.what}; all must launch the same operations "
                    "in the same order",
                )
            elif not found.ended:
                calls = self._settled(key, found, act)
            self.news.notify_all()
        _call(calls)
        return found

    def goes_on(self) -> bool:
        """Wait until a rank comes to something, or leaves; False where none does, in time."""
        with self.news:
            seen = (self.arrivals, len(self.gone))
            return self.news.wait_for(
                lambda: (self.arrivals, len(self.gone)) != seen, timeout=self.seconds
            )

    def leave(self, rank: int, why: str) -> None:
        """A rank comes to nothing any more.

        Args:
            rank: by its number in the world.
            why: as in ``lost group rank 1, which WHY``.
        """
        with self.news:
            self.gone[rank] = why
            calls = [
                call
                for found in self._open.values()
                if not found.ended
                for call in self._lost(found)
            ]
            self.news.notify_all()
        _call(calls)

    def give_up(self) -> None:
        """Fail all operations that wait for somebody."""
        with self.news:
            calls = []
            for found in self._open.values():
                if not found.ended:
                    whom = ", ".join(map(found.named, found.missing))
                    text = f"waited {self.seconds:g} s for {whom}, in vain"
                    calls += self._fail(found, f"{found.what}: {text}")
        _call(calls)

    def _settled(self, key: Hashable, found: Meeting, act: Act) -> list[Callable[[], object]]:
        if found.missing:
            return self._lost(found)
        del self._open[key]
        try:
            act({rank: found.given[rank] for rank in sorted(found.given)})
        except Exception as error:  # noqa: BLE001  raised where the operation is waited for
            found.error = f"{found.what}: {type(error).__name__}: {error}"
        return found.end()

    def _lost(self, found: Meeting) -> list[Callable[[], object]]:
        """End a meeting that waits for a rank that is gone."""
        lost = [rank for rank in found.missing if found.ranks[rank] in self.gone]
        if not lost:
            return []
        whom = ", and ".join(
            f"{found.named(rank)}, which {self.gone[found.ranks[rank]]}" for rank in lost
        )
        return self._fail(found, f"{found.what}: lost {whom}")

    @staticmethod
    def _fail(found: Meeting, text: str) -> list[Callable[[], object]]:
        found.error = found.error or text
        return found.end()


def _call(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
