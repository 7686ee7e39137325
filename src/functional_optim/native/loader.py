"""The loops of this process: from disk, or compiled by a process in the background."""

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from functional_optim.native import build, cache
from functional_optim.native.cache import Build, BuildRecipe
from functional_optim.native.from_bytes import load
from functional_optim.native.private_folder import Folder, open_folder, take_warning

MANY = 64
"""Tensors from which the compiler is started. For fewer, the loops are used if they are there."""

POLL_SECONDS = 0.2
"""How often it is looked whether the compiler is done."""

SWITCH = "FUNCTIONAL_OPTIM_LOOPS"
"""Environment variable: 0 leaves everything to Python."""


class Loops(Protocol):
    """Functions of ``loops.cpp``."""

    def remember(self, tensors: list[Any], /) -> Any | None:
        """Record the layouts and addresses of tensors; None if one is no plain dense tensor."""
        ...

    def hold(self, places: Any, tensors: list[Any], where: bool, /) -> bool:
        """Return True if tensors are like those remembered, and, if asked, in the same memory."""
        ...

    def bump(self, tensors: list[Any], positions: list[int] = ..., /) -> None:
        """Tell autograd that tensors, all or those at some positions, were written to."""
        ...

    def grads(self, tensors: list[Any], /) -> list[Any] | None:
        """The gradient of each, or None; None in place of the list where Python has to ask."""
        ...

    def mask(self, values: list[Any], /) -> bytes | None:
        """Return a byte for each value, 0 where it is None; None if no value is."""
        ...

    def advance_each(self, counts: list[Any], positions: list[int] = ..., /) -> bool:
        """Add one to each whole number in each tensor; False, with nothing done, if it cannot."""
        ...

    def common(self, counts: list[Any], positions: list[int] = ..., /) -> Any:
        """The whole number that all tensors hold; None where they differ, False if it cannot."""
        ...

    def copy(self, places: Any, tensors: list[Any], /) -> bool:
        """Copy tensors to the places; False, with nothing written, where Python has to."""
        ...

    def entries(
        self, state: dict[Any, Any], params: list[Any], /
    ) -> tuple[list[str | None], list[Any]] | None:
        """Return the keys of the dicts of parameters, None behind those of each, and their values.

        None unless the state holds a dict for each parameter, in this order, and nothing else.
        """
        ...

    def walk(self, tree: Any, /) -> tuple[list[Any], list[Any]] | None:
        """Return the tensors of a tree, and its form: the class and length of each container.

        None if the tree holds anything but plain tensors, None, tuples and lists.
        """
        ...

    def lay_out(self, tensors: list[Any], written: list[bool], slots: list[int], /) -> Any | None:
        """Record layouts for :meth:`locate`, which a guard takes too; None as for ``remember``.

        Args:
            tensors: that a step reads or writes.
            written: for each, whether the step writes to it.
            slots: for each, the position of its pointer in the table, or -1.

        Raises:
            ValueError: a slot of the table that belongs to no tensor, or to two.
        """
        ...

    def locate(self, layout: Any, tensors: list[Any], kept: int, /) -> bytes | None:
        """Return the pointers of tensors.

        None if a layout changed, a written tensor is an inference tensor or computed by autograd,
        or it shares memory with another tensor. Memory is compared only if an address changed. The
        first ``kept`` tensors are not looked at: they are as the last call found them.
        """
        ...

    def norms(self, tensors: list[Any], lanes: int, threads: int, /) -> list[float] | None:
        """Return the norm of each tensor, in double precision; None as for :meth:`squares`."""
        ...

    def squares(
        self, tensors: list[Any], most: int, lanes: int, threads: int, /
    ) -> list[float] | None:
        """Return the square of the norm of each part of each tensor, in double precision.

        None unless all tensors are contiguous and of float32, or all of bfloat16, on the CPU.

        Args:
            tensors: without elements, a tensor has one part.
            most: elements of a part, the last of a tensor excepted.
            lanes: 4 or 8 sums of every 4th or 8th element, which are then added.
            threads: at most so many add up. Their number changes no bit.
        """
        ...


class Loader:
    """Finds the loops, or has them made, without anybody waiting."""

    def __init__(self) -> None:
        self.unsaid = ""
        """A warning for whoever steps next."""
        self._begin_anew()
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._forked)

    def _begin_anew(self) -> None:
        """Nothing is known."""
        self._turn = threading.Lock()
        self.loaded: Loops | None = None
        """The loops that are there; None where :meth:`get` is to be asked."""
        self._done = False
        self._looked = False
        self._next = self._since = self._rests_until = 0.0
        self._run: Build | None = None

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
        settled: bool = self._done or (self._looked and count < MANY)
        if settled:
            return self.loaded
        # One thread at a time, and nobody waits for another.
        turn = self._turn
        if not self._done and self._is_due(count) and turn.acquire(blocking=False):
            try:
                if not self._done:
                    self._looked = True
                    self._next = time.monotonic() + POLL_SECONDS
                    self._try(partial(self._go_on, start=count >= MANY))
            finally:
                turn.release()
        return self.loaded

    def _try(self, call: Callable[[], None]) -> None:
        """Call it; if it fails, there are no loops."""
        try:
            call()
        except cache.CompileError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  whatever it is, the step must still run
            self._fail(f"{type(error).__name__}: {error}")

    def say(self) -> None:
        """Warn, once, if the loops could not be made: where nothing has been written yet."""
        text, self.unsaid = self.unsaid, ""
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _is_due(self, count: int) -> bool:
        if self._is_resting():
            return False
        return time.monotonic() >= self._next if count >= MANY else not self._looked

    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def wait(self, timeout: float | None = None, *, count: int | None = None) -> bool:
        """Wait until nothing is left to wait for, starting the compiler if need be.

        Args:
            timeout: seconds to wait at most.
            count: how many tensors the loops are wanted for; few tensors do not wait for them.

        Returns:
            Whether that is so; not where a compiler took too long, and will be tried again.
        """
        if count is not None and count < MANY:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        while self.get(MANY) is None and not self._done:
            if self._is_resting() or (until is not None and time.monotonic() >= until):
                return False
            time.sleep(0.05)
        return True

    def _go_on(self, *, start: bool) -> None:
        if os.environ.get(SWITCH) == "0":
            self._done = True
            return
        folder, recipe = open_folder(), build.recipe()
        self.unsaid += take_warning()
        if self._run is not None:
            self._look_at(self._run)
        elif not self._found(folder, recipe) and start:
            self._start(folder, recipe)
        if start and not self._done:
            self._watch_the_clock()

    def _watch_the_clock(self) -> None:
        """A compiler, here or in another process, may take long, but not for ever."""
        now = time.monotonic()
        self._since = self._since or now
        seconds = cache.compile_seconds()
        if now - self._since > seconds:
            self._stop()
            self._since, self._rests_until = 0.0, now + cache.REST_SECONDS
            again = f"it is tried again in {cache.REST_SECONDS / 60:g} minutes"
            self._say_later(f"{cache.too_long(seconds)}; {again}")

    def _found(self, folder: Folder, recipe: BuildRecipe) -> bool:
        """Load the loops, if they are on disk."""
        content = folder.read(recipe.key)
        if content is None:
            return False
        try:
            self._take(content)
        except (OSError, ImportError):
            folder.remove(recipe.key)  # made beside another torch, say: they are made anew
            return False
        return True

    def _take(self, content: bytes) -> None:
        self.loaded, self._done = cast("Loops", load(content, build.load_module)), True

    def _start(self, folder: Folder, recipe: BuildRecipe) -> None:
        """Start the compiler, if no other process has done so."""
        if missing := build.nothing_compiles():
            self._fail(missing)
            return
        self._run = Build.start(folder, recipe)
        if self._run is not None:
            waits = threading.Thread(target=self._finish, args=(self._run, self._turn), daemon=True)
            waits.start()

    def _finish(self, run: Build, turn: Any) -> None:
        """Take what the compiler makes, if nobody steps here any more, too.

        Other processes wait for it.
        """
        run.wait()
        with turn:
            if self._run is run:
                self._try(partial(self._look_at, run))

    def _look_at(self, run: Build) -> None:
        if not run.is_done():
            return
        try:
            content = run.result()
        except cache.CompileError as error:
            self._fail(str(error))
            return
        self._stop()
        self._take(content)

    def _fail(self, reason: str) -> None:
        self._stop()
        self._done = True
        self._say_later(reason)

    def _say_later(self, reason: str) -> None:
        word = cache.word_of_lacking(reason)
        if word is None:
            word = (
                f"loops over many tensors run in Python, since they were not compiled: {reason}. "
                "Nothing else changes; a step of 10,000 parameters takes some milliseconds more"
            )
        self.unsaid += "; " * bool(self.unsaid and word) + word

    def _stop(self) -> None:
        """End the compiler, and let others have their turn."""
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    def _forked(self) -> None:
        """In a child, a compiler at work is the parent's, and so are its folder and its lock."""
        self._of_parent, loops, done = self._run, self.loaded, self._done
        if self._of_parent is not None:
            self._of_parent.leave()
        self._begin_anew()
        self.loaded, self._done = loops, done


LOOPS = Loader()
