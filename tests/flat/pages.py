"""Memory of this process, as Linux reports it."""

import mmap
from pathlib import Path

import pytest

USED = Path("/proc/self/statm")
linux = pytest.mark.skipif(not USED.exists(), reason="only Linux says how much memory is resident")


def resident() -> int:
    """Return the number of bytes of memory in use."""
    return int(USED.read_text().split()[1]) * mmap.PAGESIZE
