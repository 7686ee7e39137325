"""Jobs on N real processes: started together, watched, killed in time, results brought back.

Importing torch costs seconds, so one launch runs many jobs, one after the other. Every job has a
process group of its own: one that fails takes no other with it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
START_UP_SECONDS = 150.0  # until every process has imported torch, on a busy machine


class Job(NamedTuple):
    """A function of a module in this folder, called on every rank."""

    function: Callable[..., Any]
    """Defined at module level; returns what JSON can hold."""
    arguments: Mapping[str, Any] = {}
    group_seconds: float = 30.0
    """After how long without the others a collective is an error."""


class Outcome(NamedTuple):
    """What became of a job on one rank."""

    value: Any = None
    error: str | None = None
    """``Type: message`` of what it raised, or why there is no result at all."""
    traceback: str = ""
    seconds: float = 0.0

    def result(self) -> Any:
        """What the function returned.

        Raises:
            AssertionError: it did not return; says why.
        """
        assert self.error is None, f"{self.error}\n{self.traceback}"
        return self.value


Outcomes = dict[str, list[Outcome]]
"""By the name of the job, one per rank."""


def run_ranks(
    jobs: Mapping[str, Job], *, ranks: int, seconds: float, torchrun: bool = False
) -> Outcomes:
    """Run the jobs, in order, on as many processes as there are ranks.

    Args:
        jobs: by name; every rank runs all of them.
        ranks: how many processes.
        seconds: for how long no rank may come to its next job, before all are killed. Jobs
            without a result by then have an outcome that says which rank was where.
        torchrun: start them by torchrun; jobs then share the process group of its environment.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        launch = Launch(Path(name), ranks)
        (launch.folder / "jobs.json").write_text(json.dumps(_described(jobs)))
        processes = launch.torchrun() if torchrun else launch.start()
        try:
            how = launch.wait(processes, seconds)
            launch.ask_where()
        finally:
            launch.kill(processes)
        why = launch.why(how)
        return {job: [launch.outcome(job, rank, why) for rank in range(ranks)] for job in jobs}


def _described(jobs: Mapping[str, Job]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "module": job.function.__module__.rpartition(".")[2],
            "function": job.function.__qualname__,
            "arguments": dict(job.arguments),
            "group_seconds": job.group_seconds,
        }
        for name, job in jobs.items()
    ]


class Launch:
    """The processes of one call, and the folder through which they report (see ``rank.py``)."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ranks = range(ranks)

    def start(self) -> list[subprocess.Popen[bytes]]:
        """One process per rank."""
        return [
            self._popen(
                [str(HERE / "rank.py"), str(self.folder), str(rank), str(len(self.ranks))],
                f"said.{rank}",
            )
            for rank in self.ranks
        ]

    def torchrun(self) -> list[subprocess.Popen[bytes]]:
        """One process, which starts the ranks at a port that it finds free."""
        return [
            self._popen(
                [
                    *("-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(len(self.ranks))),
                    *(str(HERE / "rank.py"), str(self.folder)),
                ],
                "said.all",
            )
        ]

    def _popen(self, arguments: Sequence[str], said: str) -> subprocess.Popen[bytes]:
        search = [str(Path(path).resolve()) for path in sys.path if path and Path(path).is_dir()]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(search),
            "PYTHONSAFEPATH": "1",  # this folder holds no top-level modules
        }
        with (self.folder / said).open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> str:
        """How it ended. If one process dies, the others have a moment to end, and no more."""
        deadline = time.monotonic() + START_UP_SECONDS
        how = f"hang: not started after {START_UP_SECONDS:g} s"
        where: list[str] = []
        died = False
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if now > deadline:
                return how
            before, where = where, [self._read(f"at.{rank}") for rank in self.ranks]
            if not died and all(where) and where != before:
                how = f"hang: no rank went on for {seconds:g} s"
                deadline = now + seconds
            if not died and any(process.poll() for process in processes):
                died, how = True, "a rank died"
                deadline = min(deadline, now + 2.0)
            time.sleep(0.02)
        codes = [process.returncode for process in processes]
        return f"a rank died (exit codes {codes})" if any(codes) else "it left no result"

    def ask_where(self) -> None:
        """Have each rank that still runs write its Python stacks."""
        running = [rank for rank in self.ranks if self._signal(rank, signal.SIGUSR1)]
        deadline = time.monotonic() + (10.0 if running else 0.0)
        while time.monotonic() < deadline:
            before = [path.stat().st_size for path in self.folder.glob("said.*")]
            time.sleep(1.0)
            if before == [path.stat().st_size for path in self.folder.glob("said.*")]:
                return

    def kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """End every process that still runs, those started by torchrun too."""
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in self.ranks:
            self._signal(rank, signal.SIGKILL)

    def _signal(self, rank: int, number: signal.Signals) -> bool:
        pid = self._read(f"pid.{rank}")
        # A number may have passed on to another process: ours has the folder among its arguments.
        command = Path("/proc", pid or "none", "cmdline")
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(self.folder).encode() in command.read_bytes():
                os.kill(int(pid), number)
                return True
        return False

    def why(self, how: str) -> str:
        """Why there may be no result: what each rank was doing, and their last words."""
        where = [f"rank {rank} was in {self._read(f'at.{rank}')!r}" for rank in self.ranks]
        # One file each: stacks are written in pieces, and would be mixed up in one.
        said = [self._read(f"said.{one}")[-4000:] for one in (*self.ranks, "all")]
        return "\n".join([how, *where, *said])

    def outcome(self, job: str, rank: int, otherwise: str) -> Outcome:
        """What a rank reported, or why it did not."""
        text = self._read(f"{job}.{rank}.json")
        return Outcome(**json.loads(text)) if text else Outcome(error=otherwise)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""
