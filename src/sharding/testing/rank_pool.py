"""Pool of processes that run functions as ranks of a process group, started once for all calls."""

import contextlib
import itertools
import math
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

from sharding.testing.processes import Process, Start, start_process
from sharding.testing.rank_process import BEGINNING, Outcome, RankCall, death_marker

START_SECONDS = 300.0
"""How long a process may take to import torch, on a busy machine."""

START = "the start of its process"

END_SECONDS = 2.0
"""How long a process may take to end by itself."""

LEAVE_SECONDS = 5.0
"""How long a finished rank stays alive after another rank has died. Then it is killed: a rank that
waits for it may notice the death only by a closed connection."""

STACK_SECONDS = 10.0
"""How long a hanging process may take to write its stacks."""


class _Rank(NamedTuple):
    process: Process
    pipe: connection.Connection
    log: Path


class RankPool:
    """Pool of processes that call functions in a process group.

    Use it as ``run(function, {"lr": 0.1}, ranks=4)``. Importing torch takes seconds; the processes
    import it once, for all calls. Each call has its own gloo process group, so a failed call does
    not affect later calls. If a rank dies or hangs, the call ends on all ranks, with an outcome
    that says where each rank was. The next call then has new processes.

    Args:
        start: ``"spawn"``: each process is a new interpreter with its own hash seed, as ranks on
            several machines are. ``"forkserver"``: each process is forked, in milliseconds, from a
            process that has imported torch; for tests that kill ranks.
        environment: variables of each rank. Only spawned processes set them before importing torch.

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
        self._method: Start = start
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
            function: defined at the top level of a module that the ranks can import. Warnings in
                it are errors.
            given: its arguments by name, the same on all ranks.
            ranks: number of ranks.
            silent_seconds: all ranks are killed if no rank ends or calls
                :func:`~sharding.testing.at` for so long.
            group_seconds: timeout of collectives.
            grace_seconds: how long the other ranks may continue after a rank has died.
            tell: called with a rank and its position, whenever a rank reports it.

        Returns:
            One outcome for each rank. Errors of a rank are in its outcome, and are not raised.
        """
        folder = self._start(ranks)
        store = str(Path(folder, f"store-{next(self._numbers)}"))
        call = RankCall(pickle.dumps((function, dict(given or {}))), store, ranks, group_seconds)
        for rank in self._ranks[:ranks]:
            with contextlib.suppress(BrokenPipeError):
                rank.pipe.send(call)
        monitor = _CallMonitor(
            self._ranks[:ranks], silent_seconds, grace_seconds, tell, death_marker(store)
        )
        try:
            why = monitor.wait()
        except BaseException:
            self._kill()
            raise
        if why:
            self._kill()
        else:
            Path(store).unlink(missing_ok=True)
        return monitor.outcomes(why)

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.pipe.close()
        deadline = time.monotonic() + END_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self, ranks: int) -> str:
        """Start missing processes, or all if any has ended. Return the folder of their files."""
        if any(not rank.process.is_alive() for rank in self._ranks):
            self._kill()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = self._folder.name
        for rank in range(len(self._ranks), ranks):
            log = Path(folder, f"said.{rank}")
            process, pipe = start_process(self._method, rank, log, self._environment)
            self._ranks.append(_Rank(process, pipe, log))
        return folder

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
            rank.process.kill()
            rank.process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _CallMonitor:
    """Monitor of one call: it collects outcomes, and notices ranks that die or hang."""

    def __init__(
        self,
        ranks: Sequence[_Rank],
        seconds: float,
        grace: float,
        tell: Callable[[int, str], object],
        marker: Path,
    ) -> None:
        self._marker = marker
        self._ranks = ranks
        self._seconds = seconds
        self._grace = grace
        self._tell = tell
        self._at = [""] * len(ranks)
        self._found: dict[int, Outcome] = {}

    def wait(self) -> str:
        """Wait for all ranks. Return why a rank has no outcome; empty if all have one."""
        deadline, died, last = time.monotonic() + self._timeout(), "", 0.0
        leave = math.inf  # the time from which finished ranks are killed
        left = dict(enumerate(self._ranks))
        while left:
            ready = connection.wait(
                [rank.pipe for rank in left.values()], max(0.0, deadline - time.monotonic())
            )
            if not ready and time.monotonic() < last:
                deadline = last
            elif not ready:
                return self._report(died or f"hang: no rank went on for {self._timeout():g} s")
            for number, rank in list(left.items()):
                if rank.pipe not in ready:
                    continue
                try:
                    self._handle(number, *rank.pipe.recv())
                    alive = True
                except (EOFError, ConnectionResetError):
                    alive = False
                if not alive or number in self._found:
                    del left[number]
                if not alive:
                    self._marker.touch()  # so that other ranks do not wait for this rank
                    rank.process.join(END_SECONDS)
                    died = f"a rank died: rank {number}, exit code {rank.process.exitcode}"
                    last = min(deadline, time.monotonic() + self._grace)
                    leave = deadline = min(last, time.monotonic() + LEAVE_SECONDS)
                elif not died:
                    deadline = time.monotonic() + self._timeout()
            self._kill_finished(leave)
        return self._report(died) if died else ""

    def _kill_finished(self, leave: float) -> None:
        """Kill ranks that are finished at a time or later. They are not used for another call."""
        for number in self._found if time.monotonic() >= leave else ():
            self._ranks[number].process.kill()

    def _timeout(self) -> float:
        """Return how long no rank may make progress; longer until all ranks have begun."""
        return self._seconds if all(self._at) else max(self._seconds, START_SECONDS)

    def _handle(self, rank: int, kind: str, content: Any) -> None:
        if kind == "done":
            self._found[rank] = content
        else:
            self._at[rank] = content
            if content != BEGINNING:
                self._tell(rank, content)

    def outcomes(self, reason: str) -> list[Outcome]:
        """Return the outcomes of all ranks; of a rank without one, the reason."""
        lost = Outcome(error=reason)
        return [self._found.get(rank, lost) for rank in range(len(self._ranks))]

    def _report(self, reason: str) -> str:
        """Return a reason, with the position, the stacks and the last output of each rank."""
        self._dump_stacks()
        positions = [
            f"rank {rank} was {'done' if rank in self._found else f'at {at or START}'}"
            for rank, at in enumerate(self._at)
        ]
        # Each rank has its own file, because stacks are written in several pieces.
        logs = [
            rank.log.read_text(errors="replace")[-4000:] if rank.log.exists() else ""
            for rank in self._ranks
        ]
        return "\n".join([reason, *positions, *logs])

    def _dump_stacks(self) -> None:
        """Let each rank that still runs write its Python stacks to its log."""
        running = [
            rank
            for number, rank in enumerate(self._ranks)
            if number not in self._found and rank.process.is_alive()
        ]
        before = [_size(rank.log) for rank in running]
        for rank in running:
            assert rank.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            now = [_size(rank.log) for rank in running]
            if all(map(int.__gt__, now, before)) and now == [_size(one.log) for one in running]:
                time.sleep(0.2)  # for the rest of the stacks
                return


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
