"""What Linux says of the memory of this process."""

import mmap
from pathlib import Path

import pytest

USED = Path("/proc/self/statm")
linux = pytest.mark.skipif(not USED.exists(), reason="only Linux says how much memory is resident")


def resident() -> int:
    """How many bytes of memory are in use."""
    return int(USED.read_text().split()[1]) * mmap.PAGESIZE
