"""Libraries, loaded from bytes that were looked at, whatever has become of their file."""

import fcntl
import itertools
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Loaded = TypeVar("Loaded")

_SPELLINGS = itertools.count(1)


def load(content: bytes, loader: Callable[[str], Loaded]) -> Loaded:
    """Load a library from its bytes, and from nothing else.

    Args:
        content: the library.
        loader: loads the file of a path. Afterwards there is nothing at that path.

    Raises:
        OSError, ImportError: it does not load.
    """
    try:
        number = os.memfd_create("functional-optim", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
            return loader(_descriptor_path(number))
    except (OSError, ImportError, AttributeError):
        # No anonymous files in this system, or none whose code may be run.
        with tempfile.TemporaryDirectory(prefix="functional-optim-") as folder:
            path = Path(folder) / f"{secrets.token_hex(8)}.so"
            path.write_bytes(content)
            return loader(str(path))


def _descriptor_path(number: int) -> str:
    """A path of an open file, spelled as no other was.

    The system takes a library of the same path for one that it has loaded already, and descriptors
    are used again: so the number of the call stands in it, as slashes (0) and dots (1).
    """
    spelling = f"{next(_SPELLINGS):b}".replace("1", "./").replace("0", "/")
    return f"/proc/self/fd/{spelling}{number}"
