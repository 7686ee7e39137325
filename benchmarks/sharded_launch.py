"""Launcher of ranks: it starts, watches and ends them together, also after an error."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.process import ROOT
from benchmarks.sharded import START

Tell = Callable[[str], object]
Rank = subprocess.Popen[str]
Lines = queue.Queue[tuple[int, dict[str, Any] | None]]

START_SECONDS = 600.0
"""Limit until every rank has imported torch and reported its position, on a busy machine."""
COMMAND = ("-W", "ignore", "-m", "benchmarks.sharded_rank")


class LaunchSettings(NamedTuple):
    """Environment variables and command prefixes of ranks."""

    environment: Mapping[str, str] = {}
    """More environment variables."""
    within: Sequence[Sequence[str]] = ()
    """Prefix of each rank's command, which runs the rest of the command somewhere else."""


HERE = LaunchSettings()


class RankError(RuntimeError):
    """Error for a rank that failed or ended, or for ranks that are all silent.

    Attributes:
        where: the contestant at the time of the error.
        why: the description of the error.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where = where
        self.why = why


def run_ranks(
    job: str,
    model: str,
    size: str,
    ranks: int,
    given: Mapping[str, Any],
    *,
    limit_seconds: float,
    tell: Tell = lambda _: None,
    places: LaunchSettings = HERE,
) -> list[Any]:
    """Run a job on ranks, each in a process. Return the answer of each rank.

    Args:
        job: a key of ``benchmarks.sharded_rank.JOBS``.
        model: a key of ``benchmarks.sharded_models.TASKS``.
        size: the size of the model.
        ranks: the number of processes.
        given: arguments of the job.
        limit_seconds: the longest time without any line, after each rank has begun.
        tell: called with each contestant that the first rank comes to.
        places: environment variables and command prefixes of the ranks.

    Raises:
        RankError: not all ranks answered.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        order = {
            "job": job,
            "model": model,
            "size": size,
            "ranks": ranks,
            "given": dict(given),
            "store": str(folder / "store"),
            # Ranks wait longer for a rank that hangs than the launcher, which reports the hang.
            "group_seconds": 4 * limit_seconds,
        }
        lines: Lines = queue.Queue()
        processes = [_started(folder, rank, order, lines, stack, places) for rank in range(ranks)]
        return _Watch(processes, lines, folder, limit_seconds, tell).results()


def _started(
    folder: Path,
    rank: int,
    order: Mapping[str, Any],
    lines: Lines,
    stack: contextlib.ExitStack,
    places: LaunchSettings,
) -> Rank:
    """Start a rank with its order, and a thread that reads its lines."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        **places.environment,
    }
    within = places.within[rank] if places.within else ()
    with _said(folder, rank).open("w") as errors:
        process = subprocess.Popen(
            [*within, sys.executable, *COMMAND],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    hearing = threading.Thread(target=_hear, args=(process, rank, lines), daemon=True)
    hearing.start()
    stack.callback(_ended, process, hearing)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process may have ended already
        process.stdin.write(json.dumps({**order, "rank": rank}) + "\n")
        process.stdin.flush()
    return process


def _said(folder: Path, rank: int) -> Path:
    return folder / f"said.{rank}"


def _hear(process: Rank, rank: int, lines: Lines) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(json.JSONDecodeError):  # half a line of a killed process
            lines.put((rank, json.loads(line)))
    lines.put((rank, None))


def _ended(process: Rank, hearing: threading.Thread) -> None:
    process.kill()
    process.wait()
    hearing.join(10.0)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


class _Watch:
    """Watcher of the ranks' lines. It collects results, and stops on a failure or silence."""

    def __init__(
        self,
        processes: Sequence[Rank],
        lines: Lines,
        folder: Path,
        limit_seconds: float,
        tell: Tell,
    ) -> None:
        self._processes = processes
        self._lines = lines
        self._folder = folder
        self._limit = limit_seconds
        self._tell = tell
        self._at: list[list[str]] = [[START] for _ in processes]

    def results(self) -> list[Any]:
        """Wait for the results of all ranks.

        Raises:
            RankError: one rank failed or ended, or all were silent for too long.
        """
        found: dict[int, Any] = {}
        while len(found) < len(self._processes):
            limit = self._limit
            if any(len(at) == 1 for at in self._at):
                limit = max(limit, START_SECONDS)
            try:
                rank, said = self._lines.get(timeout=limit)
            except queue.Empty:
                raise self._silence(limit) from None
            if rank in found:
                continue  # it has finished, and its end is no error
            if said is None:
                raise self._death(rank)
            if "failed" in said:
                raise RankError(said["at"], f"rank {rank}: {said['failed']}")
            if "result" in said:
                found[rank] = said["result"]
            else:
                self._at[rank].append(said["at"])
                if rank == 0:
                    self._tell(said["at"])
        return [found[rank] for rank in range(len(self._processes))]

    def _silence(self, limit: float) -> RankError:
        """Return an error for a hang, with the contestant of the rank with least progress."""
        last = min(self._at, key=len)[-1]
        where = ", ".join(f"rank {rank} at {at[-1]}" for rank, at in enumerate(self._at))
        return RankError(last, f"hang: no rank went on for {limit:g} s ({where})")

    def _death(self, rank: int) -> RankError:
        code = self._processes[rank].wait()
        text = _said(self._folder, rank).read_text(encoding="utf-8", errors="replace").strip()
        why = f"rank {rank} ended with {code}: {text[-1000:] or 'nothing was said'}"
        return RankError(self._at[rank][-1], why)
