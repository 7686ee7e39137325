"""Two ways to start the process of a rank."""

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal, Protocol

from functional_optim._torch import COMPILER
from sharding.testing.rank_process import serve

Start = Literal["spawn", "forkserver"]


_PROGRAM = """
import sys
from multiprocessing.connection import Connection
from sharding.testing.rank_process import serve
serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
"""


class Process(Protocol):
    """Part of ``multiprocessing``'s process that is used here."""

    @property
    def pid(self) -> int | None:
        """Its number."""

    @property
    def exitcode(self) -> int | None:
        """Exit code; None while the process runs."""

    def is_alive(self) -> bool:
        """Return True if it runs."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most so many seconds."""

    def kill(self) -> None:
        """End it now."""


def started(
    start: Start, rank: int, said: Path, environment: Mapping[str, str]
) -> tuple[Process, connection.Connection]:
    """A process that serves calls, and the pipe on which it does.

    Args:
        start: which way.
        rank: of the process.
        said: the file for all it writes to standard output and standard error.
        environment: variables, beside those of this process.
    """
    return (_spawned if start == "spawn" else _forked)(rank, said, environment)


class _Spawned:
    """A process started by ``subprocess``, which knows nothing of the program that started it.

    ``multiprocessing`` would have it import that program's main module.
    """

    def __init__(self, arguments: list[str], **options: Any) -> None:
        self._process = subprocess.Popen([sys.executable, *arguments], **options)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def kill(self) -> None:
        self._process.kill()


def _spawned(
    rank: int, said: Path, environment: Mapping[str, str]
) -> tuple[Process, connection.Connection]:
    ours, theirs = connection.Pipe()
    search = [str(Path(path).resolve()) for path in sys.path if path and Path(path).is_dir()]
    variables = {
        "PYTHONPATH": os.pathsep.join(search),
        "PYTHONSAFEPATH": "1",  # what lies in the working directory is not meant
        **environment,
    }
    with said.open("ab") as output:
        process = _Spawned(
            ["-c", _PROGRAM, str(theirs.fileno()), str(rank)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
        )
    theirs.close()
    return process, ours


def _forked(
    rank: int, said: Path, environment: Mapping[str, str]
) -> tuple[Process, connection.Connection]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["sharding.testing.rank_process", "hooks", COMPILER])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve_forked, args=(theirs, rank, str(said), dict(environment)), daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def _serve_forked(
    pipe: connection.Connection, rank: int, said: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    serve(pipe, rank)
