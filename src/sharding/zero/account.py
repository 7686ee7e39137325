"""The account of one iteration: each local shard stepped exactly once, or an error names it."""

from collections.abc import Iterable

from functional_optim.core.brief import some
from sharding.zero.local_shard import LocalShard


class Account:
    """Account of the shards that were stepped in the open iteration."""

    def __init__(self) -> None:
        self._open = False
        self._skipped: set[str] = set()
        self._stepped: set[LocalShard] = set()

    def begin(self, shards: Iterable[LocalShard]) -> None:
        """Begin an iteration.

        Raises:
            RuntimeError: the last one did not end.
        """
        was_open, missing = self._open, self._closed(shards)
        self._open = not was_open
        if was_open:
            raise RuntimeError(
                "the last iteration ended before everything was stepped; never stepped: "
                f"{some(missing)}. A backward pass failed or was cut short: go on from a "
                "checkpoint, since ranks may differ now"
            )

    def end(self, shards: Iterable[LocalShard]) -> None:
        """End it.

        Raises:
            RuntimeError: it was not begun, or a trainable shard was not stepped and not declared
                unused.
        """
        if not self._open:
            raise RuntimeError("there is no iteration to end; call begin_iteration() first")
        missing = self._closed(shards)
        if missing:
            raise RuntimeError(
                f"owned by this rank and never stepped in this iteration: {some(missing)}; "
                "declare parameters that no gradient came for with skip(paths)"
            )

    def skip(self, paths: Iterable[str]) -> None:
        """No gradient comes for these in this iteration."""
        self._skipped.update(paths)

    def check(self, shards: Iterable[LocalShard]) -> None:
        """None of these was stepped before in this iteration, and none stands here twice.

        Raises:
            RuntimeError: names the parameter.
        """
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

    def enter(self, shards: Iterable[LocalShard]) -> None:
        """These were stepped."""
        if self._open:
            self._stepped.update(shards)

    def _closed(self, shards: Iterable[LocalShard]) -> list[str]:
        """Close the iteration; what was never stepped in it."""
        missing = [
            one.path
            for one in shards
            if one.trainable and one.path not in self._skipped and one not in self._stepped
        ]
        self._open = False
        self._skipped, self._stepped = set(), set()
        return missing
