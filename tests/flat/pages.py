"""What Linux says of the memory of this process."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from functional_optim.huge_pages import LEAST_BYTES

MAPPINGS = Path("/proc/self/smaps")
ASKED = "hg"  # how Linux marks a mapping for which huge pages were asked


def _flags() -> Iterator[tuple[int, int, list[str]]]:
    """Beginning, end and flags of every mapping of this process."""
    begin = end = 0
    for line in MAPPINGS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first == "VmFlags:":
            yield begin, end, rest.split()
        elif not first.endswith(":"):
            begin, end = (int(one, 16) for one in first.split("-"))


def is_asked_for(address: int) -> bool:
    return any(begin <= address < end and ASKED in flags for begin, end, flags in _flags())


def all_asked(*tensors: torch.Tensor) -> bool:
    """Whether all but the ends of their memory, less than a page, was asked for."""
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        at = range(mmap.PAGESIZE, size - mmap.PAGESIZE, size // 5)
        if not all(is_asked_for(tensor.data_ptr() + offset) for offset in at):
            return False
    return True


def _shows_them() -> bool:
    if not MAPPINGS.exists() or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    with mmap.mmap(-1, LEAST_BYTES) as pages:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return any(ASKED in flags for *_, flags in _flags())


shown = pytest.mark.skipif(not _shows_them(), reason="this system shows no huge pages")


USED = Path("/proc/self/statm")
linux = pytest.mark.skipif(not USED.exists(), reason="only Linux says how much memory is resident")


def resident() -> int:
    """How many bytes of memory are in use."""
    return int(USED.read_text().split()[1]) * mmap.PAGESIZE
