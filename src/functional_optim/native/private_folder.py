"""The folder of compiled code: ours alone, or a temporary one of this process.

A library that is loaded runs with all that its user may do, so nobody else may have a say in what
is loaded. The folder belongs to us and only we can write to it; where that is not so there is no
cache, but a temporary folder of this process. An entry is read once, through one descriptor,
without following links; owner, mode and digest are looked at in what was opened.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

CACHE_VARIABLE = "FUNCTIONAL_OPTIM_CACHE"
"""Environment variable: the folder of what is compiled."""
SOURCE, MADE, ENTRY, SAID = "source.cpp", "library.so", "entry", "said"
"""Files of a compilation: the text, what is made of it, that with its digest, what was printed."""

_MARK = b"\nfunctional-optim entry sha256 "
"""Between a library and its digest: what loads libraries does not look behind their end."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def cache_folder() -> Path:
    """Return the folder of compiled code: ``FUNCTIONAL_OPTIM_CACHE``, else in the user's cache."""
    asked = os.environ.get(CACHE_VARIABLE)
    if asked:
        return Path(asked).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "functional_optim"


class Folder:
    """A folder that nobody else can write to, held open: its path is not looked up again.

    Args:
        path: of the folder; it is there.

    Raises:
        OSError: it is no folder, or not ours alone; says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = os.open(path, _READ | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._number)
        why = _not_ours(os.fstat(self._number))
        if why:
            raise PermissionError(f"{path} {why}")

    def read(self, key: str) -> bytes | None:
        """The content of an entry, as it was written; None if there is none, or not that."""
        try:
            sealed = self._read(f"{key}.so", checked=True)
        except OSError:
            return None
        content, mark, digest = sealed.rpartition(_MARK)
        return content if mark and digest == _digest(key, content) else None

    def keep(self, key: str, content: bytes) -> None:
        """Make an entry of some bytes, if that can be done."""
        place = f"{key}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # a full disk, say: it is found out again next time
            self._write(place, content + _MARK + _digest(key, content))
            self._publish(place, key)

    def remove(self, key: str) -> None:
        """Take an entry away, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{key}.so", dir_fd=self._number)

    def lock(self, key: str) -> int | None:
        """Wait for nobody, but take the turn to make an entry; None where nothing can be locked.

        Raises:
            BlockingIOError: another process, or thread, makes it.
        """
        try:
            number = os.open(
                f"{key}.lock",
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
                0o600,
                dir_fd=self._number,
            )
        except OSError:  # a link, say: at worst, an entry is made twice
            return None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(number)
            if isinstance(error, BlockingIOError):
                raise
            return None
        if os.fstat(number).st_nlink == 0:  # of a turn that has ended since it was opened
            os.close(number)
            raise BlockingIOError
        return number

    def unlock(self, key: str, number: int) -> None:
        """Let others have their turn."""
        with contextlib.suppress(OSError):
            os.unlink(f"{key}.lock", dir_fd=self._number)
        fcntl.flock(number, fcntl.LOCK_UN)  # also where a child holds a copy of the descriptor
        os.close(number)

    def make_place(self, place: str, source: str) -> int:
        """Make a folder in here, with a source, and a file of what is said: its descriptor."""
        os.mkdir(place, 0o700, dir_fd=self._number)
        self._write(f"{place}/{SOURCE}", source.encode())
        return self._create(f"{place}/{SAID}")

    def clear_places(self, key: str) -> None:
        """Remove what was left by a process that was killed. The turn is ours."""
        for name in os.listdir(self._number):  # noqa: PTH208  a descriptor
            if name.startswith(f"{key}-"):
                self.remove_place(name)

    def remove_place(self, place: str) -> None:
        """Remove the folder of a compilation."""
        shutil.rmtree(place, ignore_errors=True, dir_fd=self._number)

    def said(self, place: str) -> str:
        """The last line that a compiler printed."""
        lines = self._read(f"{place}/{SAID}").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"

    def publish(self, key: str, place: str) -> bytes:
        """Make an entry of what was compiled: others see all of it, or nothing."""
        content = self._read(f"{place}/{MADE}")
        with contextlib.suppress(OSError):  # a full disk, say: then it is ours alone, this once
            self._write(f"{place}/{ENTRY}", content + _MARK + _digest(key, content))
            self._publish(f"{place}/{ENTRY}", key)
        return content

    def _publish(self, name: str, key: str) -> None:
        os.replace(name, f"{key}.so", src_dir_fd=self._number, dst_dir_fd=self._number)

    def _read(self, name: str, *, checked: bool = False) -> bytes:
        with os.fdopen(os.open(name, _READ, dir_fd=self._number), "rb") as file:
            found = os.fstat(file.fileno())
            why = _not_ours(found) if checked else ""
            if why or not stat.S_ISREG(found.st_mode):
                raise PermissionError(f"{self.path / name} {why or 'is no file'}")
            return file.read()

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._number)

    def _write(self, name: str, content: bytes) -> None:
        with os.fdopen(self._create(name), "wb") as file:
            file.write(content)


def _not_ours(found: os.stat_result) -> str:
    """Return why an opened file or folder is not ours alone; empty if it is."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and not to us, {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it"
    return ""


def _digest(key: str, content: bytes) -> bytes:
    """Return the digest of a library under its name, so that it is not loaded under another."""
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


class _Temporary:
    """Temporary folder, used instead of one that is not ours alone."""

    def __init__(self) -> None:
        self.unsaid = ""
        """A warning for whoever can give it."""
        self._warned = False
        self._folder: Path | None = None
        self._process = os.getpid()

    def folder(self, reason: str) -> Folder:
        if self._process != os.getpid():  # a child of a fork: the folder is its parent's
            self._folder, self._process = None, os.getpid()
        if self._folder is None or not self._folder.exists():
            self._folder = Path(tempfile.mkdtemp(prefix="functional-optim-"))
        if not self._warned:
            self._warned = True
            self.unsaid = (
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
    """The folder of entries; where it is not ours alone, a temporary one of this process.

    Why it is not ours is a warning, once, which :func:`take_warning` hands over.
    """
    try:
        path = cache_folder()
        if not path.is_symlink() and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        return Folder(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return _TEMPORARY.folder(str(error))


def take_warning() -> str:
    """Return the warning about the folder, once; empty if there is none."""
    text, _TEMPORARY.unsaid = _TEMPORARY.unsaid, ""
    return text
