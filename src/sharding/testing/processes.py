"""Processes of ranks, spawned or forked."""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from functional_optim._torch.compilers import COMPILER
from sharding.testing.rank_process import serve

Start = Literal["spawn", "forkserver"]


_PROGRAM = """
import gc, sys
gc.disable()  # until all is imported
from multiprocessing.connection import Connection
from sharding.testing.rank_process import serve
serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
"""


class _SpawnedProcess(subprocess.Popen[bytes]):
    """Process started by ``subprocess``, with the methods of ``multiprocessing.Process``.

    ``multiprocessing`` would import the main module of this program in the process.
    """

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


Process = _SpawnedProcess | BaseProcess


def start_process(
    start: Start, rank: int, log: Path, environment: Mapping[str, str]
) -> tuple[Process, connection.Connection]:
    """Return a process that serves calls, and the pipe to it."""
    return (_spawn if start == "spawn" else _fork)(rank, log, environment)


def _spawn(
    rank: int, log: Path, environment: Mapping[str, str]
) -> tuple[Process, connection.Connection]:
    ours, theirs = connection.Pipe()
    search = [str(Path(path).resolve()) for path in sys.path if path and Path(path).is_dir()]
    variables = {
        "PYTHONPATH": os.pathsep.join(search),
        "PYTHONSAFEPATH": "1",  # no imports from the working directory
        **environment,
    }
    with log.open("ab") as output:
        process = _SpawnedProcess(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(rank)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
        )
    theirs.close()
    return process, ours


def _fork(
    rank: int, log: Path, environment: Mapping[str, str]
) -> tuple[Process, connection.Connection]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["sharding.testing.rank_process", "hooks", COMPILER])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve_forked, args=(theirs, rank, str(log), dict(environment)), daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def _serve_forked(
    pipe: connection.Connection, rank: int, log: str, environment: dict[str, str]
) -> None:
    gc.freeze()  # a collection would copy the memory that this process shares with the fork server
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    serve(pipe, rank)
