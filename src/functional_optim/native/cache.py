"""Libraries compiled from C++: cached on disk, and loaded only if their digest is right.

The key of an entry covers its source, flags, compiler, processor and torch.
:mod:`functional_optim.native.private_folder` stores and checks entries.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from functional_optim.native.private_folder import (
    LIBRARY,
    SOURCE,
    Folder,
    load_library,
    open_folder,
    pop_warning,
)

TIMEOUT_VARIABLE = "FUNCTIONAL_OPTIM_COMPILE_TIMEOUT"
"""Environment variable: seconds that one compilation may take; 600 by default."""
VERSION_SECONDS = 20.0
"""Time limit for a compiler to print its version; lower if the limit of a compilation is lower."""

RETRY_SECONDS = 600.0
"""Seconds until a compiler that timed out is tried again: the machine may be less busy then."""

_PROCESSOR_FACTS = {"vendor_id", "cpu", "cpu family", "model", "model name", "stepping", "flags"}
_PROCESSOR_FACTS |= {"Features", "isa", "uarch", "CPU implementer", "CPU architecture"}
_PROCESSOR_FACTS |= {"CPU variant", "CPU part", "CPU revision"}
"""Constant properties of a processor in ``/proc/cpuinfo``."""


class CompileError(Exception):
    """There is no compiler, or it produced no library that can be loaded."""


def compile_seconds() -> float:
    """Return the time limit of one compilation in seconds."""
    return float(os.environ.get(TIMEOUT_VARIABLE, "600"))


def no_compiler_reason(device: str) -> str:
    """Return why nothing can be compiled on this machine; empty if something can."""
    if device != "cpu":
        return ""
    try:
        command = default_compiler()
        _command_path(command)
    except CompileError as error:
        return str(error)
    return ""


_WARNED: set[str] = set()
"""Reasons that a warning about a missing compiler has named: each is given once."""


def missing_compiler_warning(reason: str) -> str | None:
    """Return the warning for a missing compiler: empty if given before, None for another reason."""
    if reason != no_compiler_reason("cpu"):
        return None
    if reason in _WARNED:
        return ""
    _WARNED.add(reason)
    return f"no step is compiled: {reason}. {SLOWER}"


SLOWER = "Steps give the same bits, and take about three times as long"
"""The effect of steps that are not compiled, for warnings."""


def default_compiler() -> tuple[str, ...]:
    """Return the words of the command in ``CXX``, or ``g++``. Raise CompileError for no command."""
    text = os.environ.get("CXX") or "g++"
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise CompileError(f"CXX is no command of a compiler: {text!r} ({error})") from error
    if not words:
        raise CompileError(f"CXX is no command of a compiler: {text!r} has no words")
    return words


class BuildRecipe(NamedTuple):
    """Everything that determines a library."""

    source: str
    """The whole C++ source."""
    flags: tuple[str, ...]
    """Arguments after the source on the compiler's command line; libraries last."""
    compiler: tuple[str, ...]
    """The words of the compiler's command."""

    @property
    def key(self) -> str:
        """Key of the library: equal for equal recipes on equal machines."""
        facts = [*self, *_compiler_facts(self.compiler), *_machine_facts()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _compiler_facts(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the compiler and its version."""
    path = Path(_command_path(command)).resolve()
    found = path.stat()
    stamp = (str(path), str(found.st_size), str(found.st_mtime_ns))
    return (*stamp, _version(command, stamp))


def _command_path(command: tuple[str, ...]) -> str:
    path = shutil.which(command[0]) if command else None
    if path is None:
        name = shlex.join(command)
        raise CompileError(
            f"there is no C++ compiler here ({name} is not found; set CXX to name one)"
        )
    return str(Path(path).absolute())


_VERSION_TIMEOUTS: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[float, str]] = {}
"""Compilers that did not print their version in time: when to try again, and the error."""


def _version(command: tuple[str, ...], stamp: tuple[str, ...]) -> str:
    """Return the version that a compiler prints. Raise CompileError soon if it timed out before."""
    rests_until, text = _VERSION_TIMEOUTS.get((command, stamp), (0.0, ""))
    if time.monotonic() < rests_until:
        raise CompileError(text)
    try:
        return _ask_version(command, stamp)
    except OSError as error:
        raise CompileError(f"the compiler does not say its version: {error}") from error
    except subprocess.TimeoutExpired as error:
        long = error.timeout >= VERSION_SECONDS
        why = (
            f"it took longer than {VERSION_SECONDS:g} s" if long else timeout_message(error.timeout)
        )
        text = f"the compiler does not say its version: {why}"
        _VERSION_TIMEOUTS[command, stamp] = (time.monotonic() + RETRY_SECONDS, text)
        raise CompileError(text) from None


@functools.lru_cache(maxsize=8)
def _ask_version(command: tuple[str, ...], stamp: tuple[str, ...]) -> str:
    process = subprocess.Popen(
        [_command_path(command), *command[1:], "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        seconds = min(VERSION_SECONDS, compile_seconds())
        return process.communicate(timeout=seconds)[0].decode(errors="replace")
    except BaseException:
        _kill(process)
        raise


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads a group, and all processes of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@functools.lru_cache(maxsize=1)
def _machine_facts() -> tuple[str, ...]:
    """Return the processor, torch and system."""
    return (
        "1",  # format of entries: another format has other keys
        sys.platform,
        platform.machine(),
        _processor_text(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        str(torch.version.git_version),
    )


def _processor_text() -> str:
    """Return the processor and its features, as code may be compiled for this processor only."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first if line.partition(":")[0].strip() in _PROCESSOR_FACTS)


class Build:
    """Running compilation of an entry. Call :meth:`start` to begin one."""

    def __init__(self, folder: Folder, key: str, place: str, lock: int | None) -> None:
        self.folder, self.key, self.place = folder, key, place
        self._lock = lock
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, folder: Folder, recipe: BuildRecipe) -> "Build | None":
        """Start the compiler.

        Return None if another process or thread compiles the library, or has just finished.
        """
        key, path = recipe.key, _command_path(recipe.compiler)
        try:
            lock = folder.lock(key)
        except BlockingIOError:
            return None
        build = cls(folder, key, "", lock)
        try:
            if folder.read(key) is not None:
                build.stop()
                return None
            if lock is not None:
                folder.remove_build_folders(key)
            build.place = f"{key}-{secrets.token_hex(8)}"
            build.process = _start_compiler(
                [path, *recipe.compiler[1:], SOURCE, "-o", LIBRARY, *recipe.flags],
                folder.path / build.place,
                folder.create_build_folder(build.place, recipe.source),
            )
        except BaseException:
            build.stop()
            raise
        return build

    def is_done(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def wait(self) -> None:
        if self.process is not None:
            self.process.wait()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the compiler. Publish and return the library, or raise CompileError."""
        assert self.process is not None
        try:
            status = self.process.wait(timeout)
            said = self.folder.compiler_output(self.place)
            if status == 0:
                return self.folder.publish(self.key, self.place)
        except subprocess.TimeoutExpired:
            raise CompileError(timeout_message(timeout)) from None
        except OSError as error:
            raise CompileError(f"the compiler left nothing: {error}") from error
        raise CompileError(f"the compiler ended with status {status}: {said}")

    def stop(self) -> None:
        """End the compiler, remove its folder and release the lock."""
        if self.process is not None and self.process.poll() is None:
            _kill(self.process)
        if self.place:
            self.folder.remove_build_folder(self.place)
        lock, self._lock = self._lock, None
        if lock is not None:
            self.folder.unlock(self.key, lock)

    def leave(self) -> None:
        """Close the lock in a child process after a fork. The parent keeps the build."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)  # the parent's descriptor still holds the lock


def _start_compiler(command: list[str], place: Path, output: int) -> "subprocess.Popen[bytes]":
    with os.fdopen(output, "wb") as said:
        # Run in a separate folder, so that includes are not searched in the current folder.
        return subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "TMPDIR": str(place)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
        )


def timeout_message(seconds: float | None) -> str:
    """Return the message about a compiler that was stopped."""
    return f"the compiler took longer than {seconds:g} s ({TIMEOUT_VARIABLE})"


_LOADED: dict[str, ctypes.CDLL] = {}
"""Libraries of this process, by key."""


def library(source: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Return the compiled library of a C++ source: from memory, from disk, or compiled now.

    The compiler is the command in ``CXX``, or ``g++``; it gets ``flags`` after the source. Several
    processes that need the same library compile it once. Calls of the library release the GIL.
    """
    recipe = BuildRecipe(source, tuple(flags), default_compiler())
    key = recipe.key
    if key in _LOADED:
        return _LOADED[key]
    try:
        folder = open_folder()
        if warning := pop_warning():
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return _LOADED.setdefault(key, _load(folder, recipe))
    except OSError as error:
        raise CompileError(f"it cannot be compiled or loaded: {error}") from error


def _load(folder: Folder, recipe: BuildRecipe) -> ctypes.CDLL:
    content = _get_content(folder, recipe)
    try:
        return load_library(content, ctypes.CDLL)
    except OSError:  # such as an entry linked to libraries that no longer exist
        folder.remove(recipe.key)
        return load_library(_get_content(folder, recipe), ctypes.CDLL)


def _get_content(folder: Folder, recipe: BuildRecipe) -> bytes:
    """Return the bytes of a library. Compile it, or wait for the process that compiles it."""
    key, seconds = recipe.key, compile_seconds()
    until = time.monotonic() + seconds
    while (content := folder.read(key)) is None:
        build = Build.start(folder, recipe)
        if build is not None:
            try:
                return build.result(seconds)
            finally:
                build.stop()
        if time.monotonic() > until:
            raise CompileError(f"{timeout_message(seconds)}, in another process")
        time.sleep(0.005)
    return content
