"""Tracker of the shards that an iteration steps: each shard exactly once."""

from collections.abc import Iterable

from functional_optim.core.format import format_names
from sharding.zero.local_shard import LocalShard


class StepTracker:
    """Tracker of the shards that were stepped in the current iteration."""

    def __init__(self) -> None:
        self._open = False
        self._skipped: set[str] = set()
        self._stepped: set[LocalShard] = set()

    def begin(self, shards: Iterable[LocalShard]) -> None:
        """Begin an iteration. Raise RuntimeError if the last iteration did not end."""
        was_open, missing = self._open, self._close(shards)
        self._open = not was_open
        if was_open:
            raise RuntimeError(
                "the last iteration ended before everything was stepped; never stepped: "
                f"{format_names(missing)}. A backward pass failed or was cut short: go on from a "
                "checkpoint, since ranks may differ now"
            )

    def end(self, shards: Iterable[LocalShard]) -> None:
        """End an iteration.

        Raise RuntimeError if a trainable shard was neither stepped nor declared unused.
        """
        if not self._open:
            raise RuntimeError("there is no iteration to end; call begin_iteration() first")
        missing = self._close(shards)
        if missing:
            raise RuntimeError(
                f"owned by this rank and never stepped in this iteration: {format_names(missing)}; "
                "declare parameters that no gradient came for with skip(paths)"
            )

    def skip(self, paths: Iterable[str]) -> None:
        """Declare that parameters have no gradient in this iteration."""
        self._skipped.update(paths)

    def check(self, shards: Iterable[LocalShard]) -> None:
        """Raise RuntimeError for shards that were stepped in this iteration, or occur twice."""
        seen = set(self._stepped)
        for one in shards:
            if one.path in self._skipped:
                raise RuntimeError(
                    f"the parameter {one.path!r} was declared unused in this iteration, and is "
                    "to be stepped now"
                )
            if one in seen:
                raise RuntimeError(
                    f"elements [{one.start}, {one.stop}) of the parameter {one.path!r} were "
                    "stepped already in this iteration, and are to be stepped again"
                )
            seen.add(one)

    def mark_stepped(self, shards: Iterable[LocalShard]) -> None:
        """Record shards that were stepped."""
        if self._open:
            self._stepped.update(shards)

    def _close(self, shards: Iterable[LocalShard]) -> list[str]:
        """Close the iteration, and return the paths of trainable shards that were not stepped."""
        missing = [
            one.path
            for one in shards
            if one.is_trainable and one.path not in self._skipped and one not in self._stepped
        ]
        self._open = False
        self._skipped, self._stepped = set(), set()
        return missing
