"""Tensors that are parts of one buffer but have separate storages, and lazy memory for buffers."""

import mmap
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

LEAST_BYTES = 1 << 20
"""Minimum size of lazy zeros. Smaller tensors share memory pages with other tensors."""

_LEAD = 64
"""Offset of lazy zeros in their first page. torch's large tensors start at this offset too, and
tensors with equal offsets are read together faster."""


class BufferMemory:
    """Memory of one buffer, and the tensors that are parts of the buffer.

    Programs that save tensors one by one (``safetensors``, ``pickle``) write the whole storage of
    each tensor, or refuse tensors that share a storage. So each part has a separate storage, which
    contains only the elements of the part. This storage keeps the memory of the buffer alive, and
    cannot be resized.

    Args:
        values: the buffer, contiguous and 1-D. The caller must not use this tensor any more.
    """

    __slots__ = ("__weakref__", "_whole", "tensor")

    def __init__(self, values: Tensor) -> None:
        # No other code has this tensor, so its storage is not resized, and parts stay valid.
        self._whole: Tensor | None = values
        self.tensor: Tensor | None = _with_own_storage(values)
        """The buffer; None once it is released."""

    def part(self, view: Tensor) -> Tensor:
        """Return a tensor with a separate storage for a dense view of :attr:`tensor`."""
        if not view.numel():
            return torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
        values, tensor = self._whole, self.tensor
        assert values is not None, "released"
        assert tensor is not None, "released"
        start = (view.data_ptr() - tensor.data_ptr()) // view.element_size()
        piece: Any = as_elements(values, view)[start : start + view.numel()]
        # The storage of the part references the piece, and the piece this object. So `buffer_of`
        # finds the buffer while a part is alive, whenever garbage is collected.
        piece.memory = self
        part = _with_own_storage(piece)
        _MEMORIES[part.device, part.data_ptr()] = self
        return part.as_strided(view.shape, view.stride())

    def release(self) -> None:
        """Drop the references to the memory; parts of the buffer keep the memory alive."""
        self._whole = self.tensor = None


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor of the same dense memory whose storage contains only that memory."""
    return from_dlpack(to_dlpack(tensor)) if tensor.numel() else tensor


def as_elements(buffer: Tensor, like: Tensor) -> Tensor:
    """Return the buffer as a complex tensor if ``like`` is complex, otherwise the buffer."""
    if not like.is_complex():
        return buffer
    return torch.view_as_complex(buffer[: buffer.numel() // 2 * 2].view(-1, 2))


def buffer_of(tensor: Tensor) -> Tensor | None:
    """Return the buffer that a tensor is a part of, or None if there is none."""
    memory = _MEMORIES.get((tensor.device, tensor.data_ptr()))
    buffer = None if memory is None else memory.tensor
    if buffer is None:
        return None
    start = buffer.data_ptr()
    end = start + buffer.numel() * buffer.element_size()
    return buffer if start <= tensor.data_ptr() < end else None


_MEMORIES: WeakValueDictionary[tuple[torch.device, int], BufferMemory] = WeakValueDictionary()
"""Buffers by device and address of the first element of each part."""


def lazy_zeros(like: Tensor) -> Tensor:
    """Return zeros like a flat tensor; on the CPU, pages are allocated when they are written.

    ``torch.zeros`` writes its zeros, so a buffer that is never used would also take memory.
    """
    size = like.numel() * like.element_size()
    if not like.is_cpu or size < LEAST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros_like(like)
    try:
        pages = mmap.mmap(-1, size + _LEAD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # not enough memory: torch raises its usual error
        return torch.zeros_like(like)
    return torch.frombuffer(pages, dtype=like.dtype, offset=_LEAD, count=like.numel())
