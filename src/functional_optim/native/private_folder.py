"""Folder of compiled code: private to this user, or temporary for this process.

A library that is loaded can do whatever its user may do. So nobody else may write to the folder:
the user owns it, and only the user has write permission. Otherwise there is no cache, only a
temporary folder of this process. An entry is read once, through one descriptor and without
following links. The owner, mode and digest of the opened file are checked, and the bytes that were
read are loaded.
"""

import atexit
import contextlib
import fcntl
import hashlib
import itertools
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Loaded = TypeVar("Loaded")

CACHE_VARIABLE = "FUNCTIONAL_OPTIM_CACHE"
"""Environment variable: the folder of compiled code."""
SOURCE, LIBRARY, ENTRY, OUTPUT = "source.cpp", "library.so", "entry", "said"
"""Files of a compilation: source, library, library with digest, and output of the compiler."""

_MARK = b"\nfunctional-optim entry sha256 "
"""Separator of a library and its digest. Loaders of libraries ignore bytes after the library."""
_CALLS = itertools.count(1)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def cache_folder() -> Path:
    """Return the folder of compiled code: ``FUNCTIONAL_OPTIM_CACHE`` or in the user's cache."""
    asked = os.environ.get(CACHE_VARIABLE)
    if asked:
        return Path(asked).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "functional_optim"


class Folder:
    """Open folder that only this user can write to. Its path is resolved once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = os.open(path, _READ | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._number)
        if why := _ownership_problem(os.fstat(self._number)):
            raise PermissionError(f"{path} {why}")

    def read(self, key: str) -> bytes | None:
        """Return the content of an entry; None if there is none, or its digest is wrong."""
        try:
            sealed = self._read(f"{key}.so", checked=True)
        except OSError:
            return None
        content, mark, digest = sealed.rpartition(_MARK)
        return content if mark and digest == _digest(key, content) else None

    def keep(self, key: str, content: bytes) -> None:
        """Write an entry, if possible."""
        place = f"{key}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # such as a full disk: another process tries again
            self._write(place, content + _MARK + _digest(key, content))
            self._publish(place, key)

    def remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{key}.so", dir_fd=self._number)

    def lock(self, key: str) -> int | None:
        """Lock an entry without waiting, and return the lock; None if locks do not work here."""
        try:
            number = os.open(
                f"{key}.lock",
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
                0o600,
                dir_fd=self._number,
            )
        except OSError:  # such as a link: at worst, an entry is compiled twice
            return None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(number)
            if isinstance(error, BlockingIOError):
                raise
            return None
        if os.fstat(number).st_nlink == 0:  # its owner has unlocked it since it was opened
            os.close(number)
            raise BlockingIOError
        return number

    def unlock(self, key: str, number: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{key}.lock", dir_fd=self._number)
        fcntl.flock(number, fcntl.LOCK_UN)  # also if a child process has a copy of the descriptor
        os.close(number)

    def create_build_folder(self, place: str, source: str) -> int:
        """Create a folder with a source file. Return a descriptor for the compiler's output."""
        os.mkdir(place, 0o700, dir_fd=self._number)
        self._write(f"{place}/{SOURCE}", source.encode())
        return self._create(f"{place}/{OUTPUT}")

    def remove_build_folders(self, key: str) -> None:
        """Remove folders of processes that were killed. The caller has the lock of the entry."""
        for name in os.listdir(self._number):  # noqa: PTH208  a descriptor
            if name.startswith(f"{key}-"):
                self.remove_build_folder(name)

    def remove_build_folder(self, place: str) -> None:
        shutil.rmtree(place, ignore_errors=True, dir_fd=self._number)

    def compiler_output(self, place: str) -> str:
        """Return the last line that a compiler printed."""
        lines = self._read(f"{place}/{OUTPUT}").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"

    def publish(self, key: str, place: str) -> bytes:
        """Make a compiled library an entry, atomically, and return it."""
        content = self._read(f"{place}/{LIBRARY}")
        with contextlib.suppress(OSError):  # such as a full disk: only this process has the library
            self._write(f"{place}/{ENTRY}", content + _MARK + _digest(key, content))
            self._publish(f"{place}/{ENTRY}", key)
        return content

    def _publish(self, name: str, key: str) -> None:
        os.replace(name, f"{key}.so", src_dir_fd=self._number, dst_dir_fd=self._number)

    def _read(self, name: str, *, checked: bool = False) -> bytes:
        with os.fdopen(os.open(name, _READ, dir_fd=self._number), "rb") as file:
            found = os.fstat(file.fileno())
            why = _ownership_problem(found) if checked else ""
            if why or not stat.S_ISREG(found.st_mode):
                raise PermissionError(f"{self.path / name} {why or 'is no file'}")
            return file.read()

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._number)

    def _write(self, name: str, content: bytes) -> None:
        with os.fdopen(self._create(name), "wb") as file:
            file.write(content)


def _ownership_problem(found: os.stat_result) -> str:
    """Return why others may write to an opened file or folder; empty if nobody else can."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and not to us, {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it"
    return ""


def _digest(key: str, content: bytes) -> bytes:
    """Return the digest of a library and its key. A library is not accepted under another key."""
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


def load_library(content: bytes, loader: Callable[[str], Loaded]) -> Loaded:
    """Load a library from its bytes, without reading any file that others can write.

    ``loader`` loads the file at a path, which is invalid afterwards. Its OSError or ImportError is
    raised.
    """
    try:
        number = os.memfd_create("functional-optim", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
            return loader(_unique_path(number))
    except (OSError, ImportError, AttributeError):
        # The system has no anonymous files, or does not allow to run code in them.
        with tempfile.TemporaryDirectory(prefix="functional-optim-") as folder:
            path = Path(folder) / f"{secrets.token_hex(8)}.so"
            path.write_bytes(content)
            return loader(str(path))


def _unique_path(descriptor: int) -> str:
    """Return a path of an open file that no earlier call has returned.

    The system does not load a path twice, and descriptors are used again. So the path contains the
    number of the call in binary, spelled in slashes (0) and dots (1).
    """
    call = f"{next(_CALLS):b}".replace("1", "./").replace("0", "/")
    return f"/proc/self/fd/{call}{descriptor}"


class _Temporary:
    """Temporary folder for this process, if others can write to the cache folder."""

    def __init__(self) -> None:
        self.pending_warning = ""
        self._warned = False
        self._folder: Path | None = None
        self._process = os.getpid()

    def folder(self, reason: str) -> Folder:
        if self._process != os.getpid():  # after a fork, the folder belongs to the parent
            self._folder, self._process = None, os.getpid()
        if self._folder is None or not self._folder.exists():
            self._folder = Path(tempfile.mkdtemp(prefix="functional-optim-"))
        if not self._warned:
            self._warned = True
            self.pending_warning = (
                f"what is compiled is not kept for other processes: {reason}. Each process "
                f"compiles anew; {CACHE_VARIABLE} names a folder that is yours alone"
            )
        return Folder(self._folder)

    def remove(self) -> None:
        if self._folder is not None and self._process == os.getpid():
            shutil.rmtree(self._folder, ignore_errors=True)


_TEMPORARY = _Temporary()
atexit.register(_TEMPORARY.remove)


def open_folder() -> Folder:
    """Return the cache folder, or a temporary folder if others can write to the cache folder.

    :func:`pop_warning` then returns the reason once.
    """
    try:
        path = cache_folder()
        if not path.is_symlink() and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        return Folder(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        return _TEMPORARY.folder(str(error))


def pop_warning() -> str:
    """Return the warning about the folder, once; empty if there is none."""
    text, _TEMPORARY.pending_warning = _TEMPORARY.pending_warning, ""
    return text
