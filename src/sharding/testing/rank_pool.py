"""Real processes that are the ranks of one call after the other: started once, watched, ended."""

import contextlib
import itertools
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from sharding.testing.rank_process import BEGINNING, RankCall, one_has_died
from sharding.testing.results import Outcome
from sharding.testing.starting import Process, Start, started

START_SECONDS = 300.0
"""Until a process has imported torch, on a busy machine."""

START = "the start of its process"

END_SECONDS = 2.0
"""How long a process may take to end by itself."""

LEAVE_SECONDS = 5.0
"""How long one that is done stays, after another one has died: its connections are open, and for
some the end of one that has failed is the only sign of the death."""

STACK_SECONDS = 10.0
"""Until a process that hangs has written its stacks."""


class _Rank(NamedTuple):
    process: Process
    pipe: connection.Connection
    said: Path


class RankPool:
    """Processes that call functions in a process group: ``run(function, {"lr": 0.1}, ranks=4)``.

    Importing torch takes a process seconds; a pool's processes do it once, for all calls. Each call
    has a gloo process group of its own, so one that fails takes no other with it. A rank that dies
    or hangs ends its call on all ranks, with an outcome that says which rank was where; the next
    call has new processes.

    Args:
        start: ``"spawn"``: each process is a fresh interpreter, with a seed of hashing of its own,
            as ranks on several machines are. ``"forkserver"``: each is forked off a process that
            has imported torch, in milliseconds: for ranks that are to be killed.
        environment: variables of each rank, set before torch is imported only where it is spawned.

    Example:
        >>> import torch.distributed as dist
        >>> from sharding.testing import RankPool
        >>> with RankPool(start="forkserver") as pool:
        ...     outcomes = pool.run(dist.get_rank, ranks=2)
        >>> [outcome.result() for outcome in outcomes]
        [0, 1]
    """

    def __init__(
        self,
        *,
        start: Start = "spawn",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._start_by: Start = start
        self._environment = {"OMP_NUM_THREADS": "1", **(environment or {})}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[_Rank] = []
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        given: Mapping[str, Any] | None = None,
        *,
        ranks: int,
        silent_seconds: float = 60.0,
        group_seconds: float = 30.0,
        grace_seconds: float = 30.0,
        tell: Callable[[int, str], object] = lambda rank, place: None,
    ) -> list[Outcome]:
        """Call ``function(**given)`` on ranks 0 to ``ranks`` - 1 of a process group.

        Args:
            function: defined at the top level of a module that the ranks can import, too. Warnings
                are errors in it.
            given: its arguments by name, the same on all ranks.
            ranks: how many.
            silent_seconds: for how long no rank may end, nor say :func:`~sharding.testing.at`,
                before all are killed.
            group_seconds: after how long without the others a collective is an error.
            grace_seconds: for how long the others may go on when one rank has died.
            tell: called with a rank and its place, whenever one says where it is.

        Returns:
            One outcome for each rank. Nothing is raised here for what went wrong on a rank.
        """
        self._start(ranks)
        assert self._folder is not None
        store = str(Path(self._folder.name, f"store-{next(self._numbers)}"))
        call = RankCall(pickle.dumps((function, dict(given or {}))), store, ranks, group_seconds)
        for rank in self._ranks[:ranks]:
            with contextlib.suppress(BrokenPipeError):
                rank.pipe.send(call)
        watch = _Watch(
            self._ranks[:ranks], silent_seconds, grace_seconds, tell, one_has_died(store)
        )
        try:
            why = watch.wait()
        except BaseException:
            self._kill()
            raise
        if why:
            outcomes = watch.outcomes(why)
            self._kill()
            return outcomes
        Path(store).unlink(missing_ok=True)
        return watch.outcomes("")

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.pipe.close()
        deadline = time.monotonic() + END_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self, ranks: int) -> None:
        """Start as many processes as a call needs; keep those that run, if all of them do."""
        if any(not rank.process.is_alive() for rank in self._ranks):
            self._kill()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        while len(self._ranks) < ranks:
            self._ranks.append(self._started(len(self._ranks)))

    def _started(self, rank: int) -> _Rank:
        assert self._folder is not None
        said = Path(self._folder.name, f"said.{rank}")
        process, pipe = started(self._start_by, rank, said, self._environment)
        return _Rank(process, pipe, said)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
            rank.process.kill()
            rank.process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Watch:
    """Observation of a call from outside."""

    def __init__(
        self,
        ranks: Sequence[_Rank],
        seconds: float,
        grace: float,
        tell: Callable[[int, str], object],
        died: Path,
    ) -> None:
        self._died = died
        self._ranks = ranks
        self._seconds = seconds
        self._grace = grace
        self._tell = tell
        self._at = [""] * len(ranks)
        self._found: dict[int, Outcome] = {}

    def wait(self) -> str:
        """Empty once every rank has its outcome; otherwise why one has none."""
        deadline, died, last = time.monotonic() + self._patience(), "", 0.0
        left = dict(enumerate(self._ranks))
        while left:
            heard = connection.wait(
                [rank.pipe for rank in left.values()], max(0.0, deadline - time.monotonic())
            )
            if not heard and time.monotonic() < last:
                self._end_done()  # as a process of a training ends, by the same error
                deadline = last
                continue
            if not heard:
                return self._why(died or f"hang: no rank went on for {self._patience():g} s")
            for number, rank in list(left.items()):
                if rank.pipe not in heard:
                    continue
                try:
                    self._hear(number, *rank.pipe.recv())
                    alive = True
                except (EOFError, ConnectionResetError):
                    alive = False
                if not alive or number in self._found:
                    del left[number]
                if not alive:
                    self._died.touch()  # so that the others do not wait for it
                    rank.process.join(END_SECONDS)
                    died = f"a rank died: rank {number}, exit code {rank.process.exitcode}"
                    last = min(deadline, time.monotonic() + self._grace)
                    deadline = min(last, time.monotonic() + LEAVE_SECONDS)
                elif not died:
                    deadline = time.monotonic() + self._patience()
        return self._why(died) if died else ""

    def _end_done(self) -> None:
        """End those that are done; where one has died, none is of use for another call."""
        for number in self._found:
            self._ranks[number].process.kill()

    def _patience(self) -> float:
        """For how long nobody may go on; longer until all of them have begun."""
        begun = all(self._at)
        return self._seconds if begun else max(self._seconds, START_SECONDS)

    def _hear(self, rank: int, kind: str, what: Any) -> None:
        if kind == "done":
            self._found[rank] = what
        else:
            self._at[rank] = what
            if what != BEGINNING:
                self._tell(rank, what)

    def outcomes(self, otherwise: str) -> list[Outcome]:
        """Return the outcomes of all ranks, with a reason for a rank without one."""
        lost = Outcome(error=otherwise)
        return [self._found.get(rank, lost) for rank in range(len(self._ranks))]

    def _why(self, how: str) -> str:
        """Return what each rank was doing, with its stacks and its last output."""
        self._ask_where()
        where = [
            f"rank {rank} was {'done' if rank in self._found else f'at {at or START}'}"
            for rank, at in enumerate(self._at)
        ]
        # One file each: stacks are written in pieces, and would be mixed up in one.
        said = [_text(rank.said)[-4000:] for rank in self._ranks]
        return "\n".join([how, *where, *said])

    def _ask_where(self) -> None:
        """Have each rank that still runs write its Python stacks."""
        running = [
            rank
            for number, rank in enumerate(self._ranks)
            if number not in self._found and rank.process.is_alive()
        ]
        before = [_size(rank.said) for rank in running]
        for rank in running:
            assert rank.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            now = [_size(rank.said) for rank in running]
            if all(map(int.__gt__, now, before)) and now == [_size(one.said) for one in running]:
                time.sleep(0.2)  # the rest of what is being written
                return


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
