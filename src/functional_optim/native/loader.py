"""The C++ loops of this process: from disk, or compiled by a background process."""

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
from functional_optim.native.private_folder import Folder, load_library, open_folder, pop_warning

MANY = 64
"""Number of tensors from which the compiler is started. Fewer tensors use existing loops."""

POLL_SECONDS = 0.2
"""Time between checks if the compiler is done."""

SWITCH = "FUNCTIONAL_OPTIM_LOOPS"
"""Environment variable: 0 disables the loops."""


class Loops(Protocol):
    """Functions of ``loops.cpp``."""

    def hold(self, layout: Any, tensors: list[Any], /) -> bool:
        """Return True if tensors have the layouts that ``lay_out`` recorded."""

    def bump(self, tensors: list[Any], positions: list[int] = ..., /) -> None:
        """Increment autograd's version counters of tensors, all or those at some positions."""

    def grads(self, tensors: list[Any], /) -> list[Any] | None:
        """Return each tensor's gradient or None; None for the list if Python must read them."""

    def mask(self, values: list[Any], /) -> bytes | None:
        """Return a byte for each value, 0 if the value is None; None if no value is None."""

    def advance_each(self, counts: list[Any], positions: list[int] = ..., /) -> bool:
        """Add one to every integer in each tensor; False, with nothing changed, if it cannot."""

    def common(self, counts: list[Any], positions: list[int] = ..., /) -> Any:
        """Return the integer that all tensors contain; None if they differ, False if unknown."""

    def entries(
        self, state: dict[Any, Any], params: list[Any], /
    ) -> tuple[list[str | None], list[Any]] | None:
        """Return the keys of the state dicts of parameters, None after each dict, and the values.

        Return None unless the state has one dict for each parameter, in this order, and nothing
        else.
        """

    def walk(self, tree: Any, /) -> tuple[list[Any], list[Any]] | None:
        """Return the tensors of a tree, and its form: the class and length of each container.

        Return None if the tree has anything but plain tensors, None, tuples and lists.
        """

    def lay_out(
        self, tensors: list[Any], written: list[bool | None], slots: list[int], /
    ) -> Any | None:
        """Record layouts for ``locate`` and ``hold``; None if one is not plain and strided.

        Args:
            tensors: that a step reads or writes.
            written: for each tensor, True if the step writes to it; None if the step writes to it,
                and it may share memory with others.
            slots: for each tensor, the position of its pointer in the table, or -1.

        Raises:
            ValueError: a slot of the table has no tensor, or two.
        """

    def layouts(self, tensors: list[Any], /) -> list[int]:
        """Return :func:`functional_optim.core.leaf.layouts_of` of tensors."""

    def locate(self, layout: Any, tensors: list[Any], /) -> bytes | None:
        """Return the pointers of tensors.

        Return None if a layout changed, or if a written tensor is an inference tensor, has a
        grad_fn or shares memory with another tensor. Memory is compared only if an address changed.
        """

    def norms(self, tensors: list[Any], lanes: int, threads: int, /) -> list[float] | None:
        """Return the norm of each tensor in float64; None as for :meth:`squares`."""

    def squares(
        self, tensors: list[Any], most: int, lanes: int, threads: int, /
    ) -> list[float] | None:
        """Return the squared norm of each part of each tensor in float64.

        Return None unless all tensors are contiguous, on the CPU, and all float32 or all bfloat16.

        Args:
            tensors: a tensor without elements has one part.
            most: elements of a part, except the last part of a tensor.
            lanes: 4 or 8 partial sums, of every 4th or 8th element, which are then added.
            threads: the largest number of threads. It does not change the result.
        """


class Loader:
    """Loads the loops, or starts their compilation, without blocking a step."""

    def __init__(self) -> None:
        self.pending_warning = ""
        """A warning for the next step."""
        self._clear()
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._after_fork)

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self.loaded: Loops | None = None
        """The loops; None until :meth:`get` has loaded them."""
        self._done = False
        self._has_looked = False
        self._next_look = self._started_at = self._retry_at = 0.0
        self._build: Build | None = None

    def reset(self) -> None:
        """Forget everything: check the environment variable, the compiler and the disk again."""
        self._stop()
        self.pending_warning = ""
        self._clear()

    def get(self, count: int) -> Loops | None:
        """Return the loops for this many tensors; None if they are not loaded yet."""
        settled: bool = self._done or (self._has_looked and count < MANY)
        if settled:
            return self.loaded
        # One thread at a time. Other threads do not wait.
        lock = self._lock
        if not self._done and self._is_due(count) and lock.acquire(blocking=False):
            try:
                if not self._done:
                    self._has_looked = True
                    self._next_look = time.monotonic() + POLL_SECONDS
                    self._try(partial(self._advance, start=count >= MANY))
            finally:
                lock.release()
        return self.loaded

    def _try(self, call: Callable[[], None]) -> None:
        """Call a function. If it raises, there are no loops."""
        try:
            call()
        except cache.CompileError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  a step must run without the loops
            self._fail(f"{type(error).__name__}: {error}")

    def warn_pending(self) -> None:
        """Give the pending warning, if any. Call this before anything is written."""
        text, self.pending_warning = self.pending_warning, ""
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _is_due(self, count: int) -> bool:
        if self._is_waiting_to_retry():
            return False
        return time.monotonic() >= self._next_look if count >= MANY else not self._has_looked

    def _is_waiting_to_retry(self) -> bool:
        return time.monotonic() < self._retry_at

    def wait(self, timeout: float | None = None, *, count: int | None = None) -> bool:
        """Wait until the loops are loaded or unavailable. Start the compiler if necessary.

        A small ``count`` of tensors does not wait. Return False on a time-out, or if a compiler
        took too long and is tried again later.
        """
        if count is not None and count < MANY:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        while self.get(MANY) is None and not self._done:
            if self._is_waiting_to_retry() or (until is not None and time.monotonic() >= until):
                return False
            time.sleep(0.05)
        return True

    def _advance(self, *, start: bool) -> None:
        if os.environ.get(SWITCH) == "0":
            self._done = True
            return
        folder, recipe = open_folder(), build.recipe()
        self.pending_warning += pop_warning()
        if self._build is not None:
            self._collect(self._build)
        elif not self._load_from_disk(folder, recipe) and start:
            self._start(folder, recipe)
        if start and not self._done:
            self._check_timeout()

    def _check_timeout(self) -> None:
        """Stop waiting for a compiler, of this or another process, that takes too long."""
        now = time.monotonic()
        self._started_at = self._started_at or now
        seconds = cache.compile_seconds()
        if now - self._started_at > seconds:
            self._stop()
            self._started_at, self._retry_at = 0.0, now + cache.RETRY_SECONDS
            again = f"it is tried again in {cache.RETRY_SECONDS / 60:g} minutes"
            self._add_warning(f"{cache.timeout_message(seconds)}; {again}")

    def _load_from_disk(self, folder: Folder, recipe: BuildRecipe) -> bool:
        """Load the loops if they are on disk. Return True if they were loaded."""
        content = folder.read(recipe.key)
        if content is None:
            return False
        try:
            self._load(content)
        except (OSError, ImportError):
            folder.remove(recipe.key)  # such as loops for another torch: compile them again
            return False
        return True

    def _load(self, content: bytes) -> None:
        self.loaded, self._done = cast("Loops", load_library(content, build.load_module)), True

    def _start(self, folder: Folder, recipe: BuildRecipe) -> None:
        """Start the compiler, unless another process runs it."""
        if missing := build.no_build_reason():
            self._fail(missing)
            return
        self._build = Build.start(folder, recipe)
        if self._build is not None:
            args = self._build, self._lock
            threading.Thread(target=self._wait_for_build, args=args, daemon=True).start()

    def _wait_for_build(self, build: Build, lock: Any) -> None:
        """Publish the library even if this process makes no more steps: other processes wait."""
        build.wait()
        with lock:
            if self._build is build:
                self._try(partial(self._collect, build))

    def _collect(self, build: Build) -> None:
        """Publish and load the library, if the compiler has ended."""
        if not build.is_done():
            return
        try:
            content = build.result()
        except cache.CompileError as error:
            self._fail(str(error))
            return
        self._stop()
        self._load(content)

    def _fail(self, reason: str) -> None:
        self._stop()
        self._done = True
        self._add_warning(reason)

    def _add_warning(self, reason: str) -> None:
        warning = cache.missing_compiler_warning(reason)
        if warning is None:
            warning = (
                f"loops over many tensors run in Python, since they were not compiled: {reason}. "
                "Nothing else changes; a step of 10,000 parameters takes some milliseconds more"
            )
        self.pending_warning += "; " * bool(self.pending_warning and warning) + warning

    def _stop(self) -> None:
        build, self._build = self._build, None
        if build is not None:
            build.stop()

    def _after_fork(self) -> None:
        """Leave a running compiler, its folder and its lock to the parent process."""
        self._of_parent, loops, done = self._build, self.loaded, self._done
        if self._of_parent is not None:
            self._of_parent.leave()
        self._clear()
        self.loaded, self._done = loops, done


LOOPS = Loader()
