"""Memory that a thread keeps from step to step, and tensors that lie in it."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KEPT_BYTES = 1 << 26
"""Most that is kept of one piece. Who needs more works for so long that making it anew does not
show."""

ALIGNMENT = 64
"""Bytes."""

KEYS = 512
"""For how many keys tensors are remembered."""

Made = tuple[Tensor, ...]


class KeptMemory(threading.local):
    """One piece of memory for each thread, as large as the largest that was asked for.

    Whoever asks next gets the same: what lies there is wanted until then only.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._known: dict[Any, Made] = {}

    def tensors(self, key: Any, count: int, make: Callable[[Tensor], Made]) -> Made:
        """Tensors in memory of so many bytes, the same ones for the same key.

        Args:
            key: says what ``make`` makes.
            count: how many bytes they need.
            make: gives the tensors in a piece of memory.
        """
        found = self._known.get(key)
        if found is not None:
            return found
        if count > KEPT_BYTES:
            return make(_memory(count))
        memory = self._memory
        if memory is None or memory.numel() < count or len(self._known) >= KEYS:
            self._known.clear()  # tensors in other memory keep that alive
        if memory is None or memory.numel() < count:
            memory = self._memory = _memory(count)
        found = self._known[key] = make(memory)
        return found


def aligned(count: int) -> int:
    """As many bytes, or a few more: what follows them begins where torch's allocator begins."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def laid_in(
    memory: Tensor, start: int, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor that begins at this byte of a piece of memory."""
    room = (memory.numel() - start) // dtype.itemsize * dtype.itemsize
    return memory[start : start + room].view(dtype).as_strided(size, stride)


def _memory(count: int) -> Tensor:
    # An inference tensor could not be written to outside of that mode.
    with torch.inference_mode(mode=False):
        return torch.empty(count, dtype=torch.uint8, device="cpu")
