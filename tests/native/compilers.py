"""Fake compilers that record each run, and finish when a test releases them."""

import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

HANGS = """sh -c 'case "$*" in *--version*) ;; *) mkfifo never; read _ < never;; esac' sh"""
"""Command of a compiler that never finishes."""

FAILS: dict[str, tuple[str, str]] = {
    "no compiler": ("no_such_compiler", "there is no C\\+\\+ compiler here \\(no_such_compiler is"),
    "fails": ("sh -c 'echo no luck; exit 1' sh", "status 1: no luck"),
    "makes nothing": ("true", "left nothing: .*No such file"),
}
"""Commands that make no library, and the messages of their errors."""


class Compiler:
    """Script that copies a library compiled beforehand.

    Args:
        folder: folder of its files.
        copies: shell code that writes the library to ``$3``; ``$1`` is the source.
        held: True if each run waits for :meth:`release`.
    """

    def __init__(self, folder: Path, copies: str, *, held: bool = False) -> None:
        self._noted, go, script = folder / "runs", folder / "go", folder / "compiler.sh"
        self._noted.touch()
        os.mkfifo(go)
        self._go = os.open(go, os.O_RDWR | os.O_NONBLOCK)
        script.write_text(
            'case "$*" in *--version*) exit;; esac\n'
            f"echo run >> {shlex.quote(str(self._noted))}\n"
            + held * f"read _ < {shlex.quote(str(go))}\n"
            + copies
        )
        self.command = shlex.join(["sh", str(script)])

    @property
    def runs(self) -> int:
        return len(self._noted.read_text().split())

    def release(self) -> None:
        """Let waiting runs, and a few later runs, finish."""
        os.write(self._go, b"go\n" * 16)

    def close(self) -> None:
        os.close(self._go)


class Clock:
    """Stand-in for ``time`` that a test can move ahead."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def children(count: int, work: Callable[[], bool]) -> list[int]:
    """Start the work in forked processes, and return their process ids."""
    started = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if work() else 1)
            finally:
                os._exit(2)
        started.append(pid)
    return started


def all_well(pids: list[int]) -> bool:
    """Wait for the processes, and return True if all of them succeeded."""
    return [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
