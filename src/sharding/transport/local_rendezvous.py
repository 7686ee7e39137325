"""Rendezvous of ranks in one process: an operation runs once all of its ranks have joined."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from sharding.transport.protocol import TransportError

Action = Callable[[Mapping[int, Any]], None]
"""Runs an operation on the values of all ranks, by group rank."""


class Rendezvous:
    """Operation of some ranks of a group: ``members`` are group ranks, ``ranks`` global ranks."""

    def __init__(self, operation: str, ranks: Sequence[int], members: Sequence[int]) -> None:
        self.operation = operation
        self.inputs: dict[int, Any] = {}
        """The values of the ranks that have joined, by group rank."""
        self.error: str | None = None
        self.ranks = ranks
        self.members = members
        self.ended = threading.Event()
        """Set at the end of the operation, also after an error."""

    @property
    def missing(self) -> list[int]:
        """Return the group ranks that have not joined."""
        return [rank for rank in self.members if rank not in self.inputs]

    def format_rank(self, rank: int) -> str:
        """Return a group rank as errors name it."""
        return f"group rank {rank} (global rank {self.ranks[rank]})"

    def wait(self, seconds: float | None = None) -> Mapping[int, Any]:
        """Wait for all ranks, and return their values by group rank."""
        if not self.ended.wait(seconds):
            raise RuntimeError(f"{self.operation}: timed out after {seconds} s")
        if self.error is not None:
            raise TransportError(self.error)
        return self.inputs

    def run(self, action: Action) -> None:
        """Run the operation on the values of all ranks, and end it."""
        try:
            action({rank: self.inputs[rank] for rank in sorted(self.inputs)})
        except Exception as error:  # noqa: BLE001  raised by every rank that waits
            self.error = f"{self.operation}: {type(error).__name__}: {error}"
        self.ended.set()

    def fail(self, error: str) -> None:
        """End the operation with an error, unless it has one already."""
        self.error = self.error or error
        self.ended.set()


class WorldState:
    """Pending operations of a world, and the ranks that have left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.changed = threading.Condition(threading.RLock())
        """Held during every change, and notified after it."""
        self.arrivals = 0
        """How many times a rank has joined an operation. It shows that the world makes progress."""
        self.left: dict[int, str] = {}
        """The ranks that join no more operations, and the reasons, by global rank."""
        self._pending: dict[Hashable, Rendezvous] = {}

    def join(
        self, key: Hashable, rank: int, value: Any, new: Rendezvous, action: Action
    ) -> Rendezvous:
        """Join an operation, and run it if all other ranks have joined.

        Returns:
            The rendezvous of all ranks.
        """
        with self.changed:
            found = self._pending.setdefault(key, new)
            self.arrivals += 1
            found.inputs[rank] = value
            if found.operation != new.operation:
                first = next(iter(found.inputs))
                found.fail(
                    f"ranks are out of step: {found.format_rank(first)} is at {found.operation}, "
                    f"and {found.format_rank(rank)} at {new.operation}; all must launch the same "
                    "operations in the same order"
                )
            elif not found.ended.is_set() and found.missing:
                self._fail_if_left(found)
            elif not found.ended.is_set():
                del self._pending[key]
                found.run(action)
            self.changed.notify_all()
        return found

    def wait_for_progress(self) -> bool:
        """Wait until a rank joins an operation or leaves. Return False after the timeout."""
        with self.changed:
            before = (self.arrivals, len(self.left))
            return self.changed.wait_for(
                lambda: (self.arrivals, len(self.left)) != before, timeout=self.seconds
            )

    def leave(self, rank: int, why: str) -> None:
        """Record that a global rank joins no more operations; fail operations that wait for it.

        The error is ``lost group rank 1, which WHY``.
        """
        with self.changed:
            self.left[rank] = why
            for found in self._pending.values():
                if not found.ended.is_set():
                    self._fail_if_left(found)
            self.changed.notify_all()

    def fail_pending(self) -> None:
        """Fail all operations that wait for a rank, after the timeout."""
        with self.changed:
            for found in self._pending.values():
                if not found.ended.is_set():
                    whom = ", ".join(map(found.format_rank, found.missing))
                    text = f"waited {self.seconds:g} s for {whom}, in vain"
                    found.fail(f"{found.operation}: {text}")

    def _fail_if_left(self, found: Rendezvous) -> None:
        """Fail an operation if it waits for a rank that has left."""
        lost = [rank for rank in found.missing if found.ranks[rank] in self.left]
        if lost:
            whom = ", and ".join(
                f"{found.format_rank(rank)}, which {self.left[found.ranks[rank]]}" for rank in lost
            )
            found.fail(f"{found.operation}: lost {whom}")
