"""Libraries compiled from C++, kept on disk and loaded only as they were written.

An entry is named by everything it was made from: its text, flags, compiler, processor and torch.
Where it lies and how it is checked: :mod:`functional_optim.native.private_folder`. The very bytes
that were checked are loaded: :mod:`functional_optim.native.from_bytes`.
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

from functional_optim.native.from_bytes import load
from functional_optim.native.private_folder import MADE, SOURCE, Folder, open_folder, take_warning

TIMEOUT_VARIABLE = "FUNCTIONAL_OPTIM_COMPILE_TIMEOUT"
"""Environment variable: seconds that one compilation may take; 600 by default."""
VERSION_SECONDS = 20.0
"""Most seconds that a compiler may take to print its version; one compilation may take less."""

REST_SECONDS = 600.0
"""Seconds before a compiler that timed out is tried again: the machine may be less busy then."""

_PROCESSOR_FACTS = {"vendor_id", "cpu", "cpu family", "model", "model name", "stepping", "flags"}
_PROCESSOR_FACTS |= {"Features", "isa", "uarch", "CPU implementer", "CPU architecture"}
_PROCESSOR_FACTS |= {"CPU variant", "CPU part", "CPU revision"}
"""What ``/proc/cpuinfo`` says of a processor that is the same at any time."""


class CompileError(Exception):
    """There is no compiler, or it made nothing that can be loaded."""


def compile_seconds() -> float:
    """Return the time limit of one compilation in seconds."""
    return float(os.environ.get(TIMEOUT_VARIABLE, "600"))


def no_compiler(device: str) -> str:
    """Return why nothing can be compiled on this machine; empty if something can."""
    if device != "cpu":
        return ""
    try:
        command = default_compiler()
        _command_path(command)
    except CompileError as error:
        return str(error)
    return ""


_LACKING: set[str] = set()
"""What was said of compilers that are not there: once is enough, whoever wants one."""


def word_of_lacking(reason: str) -> str | None:
    """Return the warning about a missing compiler.

    Args:
        reason: why nothing was compiled.

    Returns:
        A warning; empty if it was given before, None where a compiler is there.
    """
    if reason != no_compiler("cpu"):
        return None
    if reason in _LACKING:
        return ""
    _LACKING.add(reason)
    return f"no step is compiled: {reason}. {SLOWER}"


SLOWER = "Steps give the same bits, and take about three times as long"
"""What becomes of steps that are not compiled."""


def default_compiler() -> tuple[str, ...]:
    """The words of the compiler's command: those of ``CXX``, else ``g++``.

    Raises:
        CompileError: ``CXX`` is no command.
    """
    text = os.environ.get("CXX") or "g++"
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise CompileError(f"CXX is no command of a compiler: {text!r} ({error})") from error
    if not words:
        raise CompileError(f"CXX is no command of a compiler: {text!r} has no words")
    return words


class BuildRecipe(NamedTuple):
    """All that decides what a library is."""

    source: str
    """The whole text, in C++."""
    flags: tuple[str, ...]
    """What follows the source on the compiler's command line; libraries last."""
    compiler: tuple[str, ...]
    """The words of its command."""

    @property
    def key(self) -> str:
        """A name for the library: equal for equal recipes on equal machines.

        Raises:
            CompileError: there is no such compiler, or it does not answer.
        """
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


_SILENT: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[float, str]] = {}
"""Compilers that did not print their version in time: when to ask again, and the error's text."""


def _version(command: tuple[str, ...], stamp: tuple[str, ...]) -> str:
    """Return what a compiler prints as its version; one that hangs is asked once per rest.

    Raises:
        CompileError: the compiler cannot be started, or took too long.
    """
    rests_until, text = _SILENT.get((command, stamp), (0.0, ""))
    if time.monotonic() < rests_until:
        raise CompileError(text)
    try:
        return _ask_version(command, stamp)
    except OSError as error:
        raise CompileError(f"the compiler does not say its version: {error}") from error
    except subprocess.TimeoutExpired as error:
        long = error.timeout >= VERSION_SECONDS
        why = f"it took longer than {VERSION_SECONDS:g} s" if long else too_long(error.timeout)
        text = f"the compiler does not say its version: {why}"
        _SILENT[command, stamp] = (time.monotonic() + REST_SECONDS, text)
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
    """End a process that leads a group, and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@functools.lru_cache(maxsize=1)
def _machine_facts() -> tuple[str, ...]:
    """Return the processor, torch and system."""
    return (
        "1",  # of this file: entries of another make have other names
        sys.platform,
        platform.machine(),
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        str(torch.version.git_version),
    )


def _processor() -> str:
    """Return the processor and its features: code may be made for this one."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first if line.partition(":")[0].strip() in _PROCESSOR_FACTS)


class Build:
    """A compiler at work on an entry. To begin one, :meth:`start`."""

    def __init__(self, folder: Folder, key: str, place: str, lock: int | None) -> None:
        self.folder, self.key, self.place = folder, key, place
        self._lock = lock
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, folder: Folder, recipe: BuildRecipe) -> "Build | None":
        """Run the compiler on a recipe.

        Args:
            folder: of entries.
            recipe: what is wanted.

        Returns:
            The build; None if another process or thread is at it, or has just got done.

        Raises:
            CompileError: there is no such compiler.
            OSError: nothing can be written.
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
                folder.clear_places(key)
            build.place = f"{key}-{secrets.token_hex(8)}"
            build.process = _started(
                [path, *recipe.compiler[1:], SOURCE, "-o", MADE, *recipe.flags],
                folder.path / build.place,
                folder.make_place(build.place, recipe.source),
            )
        except BaseException:
            build.stop()
            raise
        return build

    def is_done(self) -> bool:
        """Return True if the compiler has ended."""
        return self.process is None or self.process.poll() is not None

    def wait(self) -> None:
        """Wait until the compiler has ended."""
        if self.process is not None:
            self.process.wait()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the compiler, and publish what it made; the library.

        Raises:
            CompileError: it made nothing, or took too long.
        """
        assert self.process is not None
        try:
            status = self.process.wait(timeout)
            said = self.folder.said(self.place)
            if status == 0:
                return self.folder.publish(self.key, self.place)
        except subprocess.TimeoutExpired:
            raise CompileError(too_long(timeout)) from None
        except OSError as error:
            raise CompileError(f"the compiler left nothing: {error}") from error
        raise CompileError(f"the compiler ended with status {status}: {said}")

    def stop(self) -> None:
        """End the compiler, and let others have their turn."""
        if self.process is not None and self.process.poll() is None:
            _kill(self.process)
        if self.place:
            self.folder.remove_place(self.place)
        lock, self._lock = self._lock, None
        if lock is not None:
            self.folder.unlock(self.key, lock)

    def leave(self) -> None:
        """In a child of a fork: it is the parent's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)  # one of two descriptors: the parent holds it by the other


def _started(command: list[str], place: Path, output: int) -> "subprocess.Popen[bytes]":
    with os.fdopen(output, "wb") as said:
        # In a folder of its own: what a text includes is not looked for where the user stands.
        return subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "TMPDIR": str(place)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
        )


def too_long(seconds: float | None) -> str:
    """Return the message about a compiler that was stopped."""
    return f"the compiler took longer than {seconds:g} s ({TIMEOUT_VARIABLE})"


_LOADED: dict[str, ctypes.CDLL] = {}
"""The libraries of this process, by the keys of their recipes."""


def library(
    source: str, flags: Sequence[str], compiler: Sequence[str] | None = None
) -> ctypes.CDLL:
    """The library that a compiler makes of a text: from memory, from disk, or compiled now.

    Several processes that want the same at once compile it once.

    Args:
        source: the whole text, in C++.
        flags: what follows it on the command line, such as ``-shared``; libraries last.
        compiler: the words of the compiler's command; those of ``CXX``, else ``g++``.

    Returns:
        The library, loaded; calls of it let go of the GIL.

    Raises:
        CompileError: there is no compiler, or it made nothing that loads; says why.

    Example::

        >>> text = 'extern "C" int twice(int number) { return 2 * number; }'
        >>> library(text, ["-shared", "-fPIC"]).twice(21)
        42
    """
    recipe = BuildRecipe(
        source, tuple(flags), default_compiler() if compiler is None else tuple(compiler)
    )
    key = recipe.key
    if key in _LOADED:
        return _LOADED[key]
    try:
        folder = open_folder()
        if warning := take_warning():
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return _LOADED.setdefault(key, _loaded(folder, recipe))
    except OSError as error:
        raise CompileError(f"it cannot be compiled or loaded: {error}") from error


def _loaded(folder: Folder, recipe: BuildRecipe) -> ctypes.CDLL:
    content = _content(folder, recipe)
    try:
        return load(content, ctypes.CDLL)
    except OSError:  # made beside libraries that are no longer there, say
        folder.remove(recipe.key)
        return load(_content(folder, recipe), ctypes.CDLL)


def _content(folder: Folder, recipe: BuildRecipe) -> bytes:
    """The bytes of a library, waiting for whoever makes it."""
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
            raise CompileError(f"{too_long(seconds)}, in another process")
        time.sleep(0.005)
    return content
