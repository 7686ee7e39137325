"""The loops of this process: from disk, or compiled by a process in the background."""

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO, cast

from functional_optim.executors.cache_entry import BrokenEntryError, publish
from functional_optim.executors.compiler import TIMEOUT_VARIABLE, cache_folder
from functional_optim.native import build

MANY = 256
"""Tensors from which the compiler is started. For fewer, the loops are used if they are there."""

POLL_SECONDS = 0.2
"""How often it is looked whether the compiler is done."""

MADE, SAID = "loops.so", "said"
"""What a compiler makes, and the file of what it says."""

_NICE = shutil.which("nice")
_POLITELY = [_NICE, "-n", "5"] if _NICE else []
"""Training goes on meanwhile."""

SWITCH = "FUNCTIONAL_OPTIM_LOOPS"
"""Environment variable: 0 leaves everything to Python."""


class Loops(Protocol):
    """What ``loops.cpp`` has."""

    def alone(self) -> None:
        """Use no threads but the caller's from now on."""
        ...

    def remember(self, tensors: list[Any], /) -> Any | None:
        """What tensors are like, and where they lie; None if one is no plain dense tensor."""
        ...

    def hold(self, places: Any, tensors: list[Any], where: bool, change: int, /) -> bool:
        """Whether tensors are like those remembered, and, if asked, in the same memory.

        It tells autograd on the way that the first ``change`` of them are written to.
        """
        ...

    def bump(self, tensors: list[Any], /) -> None:
        """Tell autograd that tensors were written to."""
        ...

    def grads(self, tensors: list[Any], /) -> list[Any] | None:
        """The gradient of each, or None; None in place of the list where Python has to ask."""
        ...

    def advance(self, counts: Any, /) -> bool:
        """Add one to each whole number; False, with nothing done, where Python has to."""
        ...

    def copy(self, places: Any, tensors: list[Any], threads: int, /) -> bool:
        """Copy tensors to the places; False, with nothing written, where Python has to."""
        ...

    def fits(self, places: Any, tensors: list[Any], taken: Any, /) -> bool:
        """Whether tensors are like those remembered, and lie neither there nor where others do."""
        ...

    def bring(
        self, places: Any, tensors: list[Any], first: int, last: int, target: Any, threads: int, /
    ) -> bool:
        """Copy some tensors to a target, as far apart as their places; False if that fails."""
        ...


class _Run(NamedTuple):
    """A compiler at work."""

    process: "subprocess.Popen[bytes]"
    place: Path
    """The folder of what it makes, and of what it says."""
    lock: TextIO
    """Held until it is done, so that no other process starts one."""


class Loader:
    """Finds the loops, or has them made, without anybody waiting."""

    def __init__(self) -> None:
        self.unsaid = ""
        """A warning for whoever steps next."""
        self._is_child = False
        self._begin_anew()
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._forked)

    def _begin_anew(self) -> None:
        """Nothing is known."""
        self._turn = threading.Lock()
        self._loops: Loops | None = None
        self._done = False
        self._looked = False
        self._next = self._since = 0.0
        self._run: _Run | None = None

    def forget(self) -> None:
        """Begin anew: the switch, the compiler and the disk are looked at again."""
        self._stop()
        self.unsaid = ""
        self._begin_anew()

    def get(self, count: int) -> Loops | None:
        """The loops, if they are there by now.

        Args:
            count: how many tensors they are wanted for.
        """
        # One thread at a time, and nobody waits for another.
        turn = self._turn
        if not self._done and self._is_due(count) and turn.acquire(blocking=False):
            try:
                if not self._done:
                    self._looked = True
                    self._next = time.monotonic() + POLL_SECONDS
                    self._go_on(start=count >= MANY)
            except Exception as error:  # noqa: BLE001  whatever it is, the step must still run
                self._fail(f"{type(error).__name__}: {error}")
            finally:
                turn.release()
        return self._loops

    def say(self) -> None:
        """Warn, once, if the loops could not be made: where nothing has been written yet."""
        text, self.unsaid = self.unsaid, ""
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _is_due(self, count: int) -> bool:
        return time.monotonic() >= self._next if count >= MANY else not self._looked

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to wait for, starting the compiler if need be.

        Returns:
            Whether that is so.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.get(MANY) is None and not self._done:
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(0.05)
        return True

    def _go_on(self, *, start: bool) -> None:
        if os.environ.get(SWITCH) == "0":
            self._done = True
            return
        folder = cache_folder()
        if self._run is not None:
            self._look_at(self._run, folder)
        elif not self._found(folder) and start:
            self._start(folder)
        if start and not self._done:
            self._watch_the_clock()

    def _watch_the_clock(self) -> None:
        """A compiler, here or in another process, may take long, but not for ever."""
        now = time.monotonic()
        self._since = self._since or now
        seconds = float(os.environ.get(TIMEOUT_VARIABLE, "600"))
        if now - self._since > seconds:
            self._fail(f"the compiler took longer than {seconds:g} s ({TIMEOUT_VARIABLE})")

    def _found(self, folder: Path) -> bool:
        """Load the loops, if they are on disk."""
        try:
            module = build.load(folder)
        except BrokenEntryError:
            return False  # they are made anew
        if module is None:
            return False
        self._loops, self._done = cast("Loops", module), True
        if self._is_child:
            self._loops.alone()
        return True

    def _start(self, folder: Path) -> None:
        """Start the compiler, if no other process has done so."""
        if missing := build.nothing_compiles():
            self._fail(missing)
            return
        folder.mkdir(parents=True, exist_ok=True)
        # Not a FileLock: in a child that is forked meanwhile, it would let go of the parent's lock.
        lock = build.files(folder)[0].with_suffix(".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return  # another process compiles: look again
        if self._found(folder):
            lock.close()
            return
        prefix = f"{build.files(folder)[0].stem}-"
        for left in folder.glob(f"{prefix}*/"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        place = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        with (place / SAID).open("wb") as said:
            process = subprocess.Popen(
                [*_POLITELY, *build.command(place / MADE)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                process_group=0,
            )
        self._run = _Run(process, place, lock)

    def _look_at(self, run: _Run, folder: Path) -> None:
        status = run.process.poll()
        if status is None:
            return
        said = (run.place / SAID).read_text(errors="replace").strip().splitlines()
        if status == 0:
            publish(run.place / MADE, *build.files(folder))
        self._stop()
        if status != 0 or not self._found(folder):
            last = said[-1] if said else "it says nothing"
            self._fail(f"the compiler ended with status {status}: {last}")

    def _fail(self, reason: str) -> None:
        self._stop()
        self._done = True
        self.unsaid = (
            f"loops over many tensors run in Python, since they were not compiled: {reason}. "
            "Nothing else changes; a step of 10,000 parameters takes some milliseconds more"
        )

    def _stop(self) -> None:
        """End the compiler, and let others have their turn."""
        run, self._run = self._run, None
        if run is None:
            return
        if run.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        shutil.rmtree(run.place, ignore_errors=True)
        fcntl.flock(run.lock, fcntl.LOCK_UN)  # also where a child holds a copy of the handle
        run.lock.close()

    def _forked(self) -> None:
        """In a child, a compiler at work is the parent's, and so are its folder and its lock.

        The threads of the parent are not there.
        """
        self._is_child = True
        self._of_parent, loops, done = self._run, self._loops, self._done
        if self._of_parent is not None:
            self._of_parent.lock.close()  # one of two handles: the parent holds it by the other
        self._begin_anew()
        self._loops, self._done = loops, done
        if loops is not None:
            loops.alone()


LOOPS = Loader()
