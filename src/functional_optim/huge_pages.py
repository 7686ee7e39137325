"""Large flat buffers in huge pages, where the system gives those to whoever asks.

A step of large parameters does nothing but read and write memory, and to find each page of 4 KiB
takes the processor a look at tables that do not fit its caches: in pages of 2 MiB, the same step
takes a twentieth to a tenth less. Linux gives them unasked only where it is set up so. What is
written after a fork, while the child lives, lies in small pages again.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

LEAST_BYTES = 1 << 25
"""From here on. C libraries give most blocks so large a mapping of their own, so that nothing else
is in the pages, and what was asked for them ends with the block. Smaller ones fit the caches."""

SWITCH = "FUNCTIONAL_OPTIM_HUGE_PAGES"
"""Environment variable: 0 leaves memory as it comes."""


def huge_empty(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What ``torch.empty`` gives, in huge pages if it is large and on the CPU."""
    made = torch.empty(length, dtype=dtype, device=device)
    ask_for_huge_pages(made)
    return made


def move_to_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Give tensors that nobody else holds yet other memory, with the same values, if large.

    One after the other, and each stays the same object. One that shares its memory with another, or
    with a file, or that lies in it in gaps, is left where it is.
    """
    for tensor in tensors:
        if _may_move(tensor):
            made = torch.empty_like(tensor)
            if ask_for_huge_pages(made):
                tensor.data = made.copy_(tensor)


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages for the memory of a tensor, if it is large, where none is in use yet.

    Not for what is used here and there only: whoever writes a byte takes 2 MiB then.

    Returns:
        Whether the system took note.
    """
    if not tensor.is_cpu or not _is_large(tensor) or not _is_wanted():
        return False
    advise = _madvise()
    if advise is None:
        return False
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    return advise(begin, end - begin, mmap.MADV_HUGEPAGE) == 0


def _may_move(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    if not plain or not _is_large(tensor) or tensor.is_inference() or tensor.is_shared():
        return False
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous()
    # Its own memory, and no one else's: not that of a file, an array, or another tensor.
    own = storage.filename is None and storage.resizable()
    return whole and own and _holders(storage) == 2  # the tensor, and this storage


def _holders(storage: torch.UntypedStorage) -> int | None:
    """How many tensors and storages of Python hold the same memory; None where torch hides that."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001  torch has no public name
    return None if count is None else count(storage._cdata)  # noqa: SLF001  nor for this


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LEAST_BYTES


def _is_wanted() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE") and os.environ.get(SWITCH) != "0"


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's own, since Python has one for its mappings only."""
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found
