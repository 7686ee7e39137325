"""Ranks that live as long as a test, so that hypothesis may draw, and shrink, case by case."""

import json
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import runs
from .cases import Case
from .harness import processes

RANKS = 4
CASE_SECONDS = 90.0  # on a machine that does much else; a case takes a fraction of a second
GROUP_SECONDS = 20.0


class Pool:
    """Processes that run one case after the other; made anew after a case that failed."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._hand_in(None)
            self._launch.wait(self._started, 30.0)
        self.stop()

    def run(self, case: Case) -> list[Any]:
        """What each rank of the case's world has seen.

        Raises:
            AssertionError: a rank failed, died or hung; says which, and where it was.
        """
        if self._folder is None:
            self._start()
        name = f"case-{self._number}"
        job = processes.Job(runs.run_case, {"case": case._asdict()}, GROUP_SECONDS)
        (described,) = processes._described({name: job})
        self._hand_in(described)
        how = self._wait(name, case.world)
        if how:
            self._launch.ask_where()
        why = self._launch.why(how)
        outcomes = [self._launch.outcome(name, rank, why) for rank in range(case.world)]
        if any(outcome.error is not None for outcome in outcomes):
            self.stop()  # groups may be out of step
        return [outcome.result() for outcome in outcomes]

    def stop(self) -> None:
        """End all processes."""
        if self._folder is not None:
            self._launch.kill(self._started)
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="drawn-")
        self._number = 0
        self._launch = processes.Launch(Path(self._folder.name), RANKS)
        (self._launch.folder / "jobs.json").write_text("[]")
        self._started = self._launch.start()

    def _hand_in(self, job: Any) -> None:
        path = self._launch.folder / f"job.{self._number}"
        path.with_suffix(".part").write_text(json.dumps(job))
        path.with_suffix(".part").replace(path)  # a rank must not find half of it
        self._number += 1

    def _wait(self, name: str, ranks: int) -> str:
        """Empty once all ranks have reported; else why one has not."""
        seconds = CASE_SECONDS + (processes.START_UP_SECONDS if self._number == 1 else 0.0)
        deadline = time.monotonic() + seconds
        left = [self._launch.folder / f"{name}.{rank}.json" for rank in range(ranks)]
        while left:
            left = [path for path in left if not path.exists()]
            if left and any(process.poll() is not None for process in self._started):
                return "a rank died"
            if time.monotonic() > deadline:
                return f"hang: no result after {seconds:g} s"
            time.sleep(0.003)
        return ""
