"""Zeros that take no memory before they are written to."""

import mmap

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20
"""From here on: a smaller tensor shares its pages with others."""

_LEAD = 64
"""Bytes of the first page that are left out: there, the large tensors of torch begin. Two that are
read together are read faster if they begin alike."""


def untouched_zeros(like: Tensor) -> Tensor:
    """Zeros like a flat tensor, on the CPU of pages that the system gives as they are written to.

    ``torch.zeros`` writes its zeros. A buffer that is there in case that it is used would take as
    much memory as one in use.

    Args:
        like: 1-D and contiguous.
    """
    size = like.numel() * like.element_size()
    if not like.is_cpu or size < LEAST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros_like(like)
    try:
        pages = mmap.mmap(-1, size + _LEAD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many for the system: torch says so as it always does
        return torch.zeros_like(like)
    return torch.frombuffer(pages, dtype=like.dtype, offset=_LEAD, count=like.numel())
