"""Tensors that are parts of one buffer, each with a storage of its own; memory for buffers."""

import mmap
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

LEAST_BYTES = 1 << 20
"""From here on: a smaller tensor shares its pages with others."""

_LEAD = 64
"""Bytes of the first page that are left out: there, the large tensors of torch begin. Two that are
read together are read faster if they begin alike."""


class BufferMemory:
    """Memory of one buffer, and the tensors that are parts of the buffer.

    Programs that save tensors one by one (``safetensors``, ``pickle``) write the storage behind
    each tensor, or refuse tensors that share one. So a part has a storage of its own, which is
    exactly the elements of the part. That storage keeps the memory of the buffer alive, and cannot
    be resized.

    Args:
        values: the buffer, contiguous and in one dimension; nobody else may use this tensor.

    Example::

        >>> memory = BufferMemory(torch.zeros(6))
        >>> part = memory.part(memory.tensor[2:4])
        >>> part.untyped_storage().nbytes(), part.storage_offset()
        (8, 0)
        >>> _ = memory.tensor.fill_(1.0)
        >>> part
        tensor([1., 1.])
        >>> buffer_of(part) is memory.tensor
        True
    """

    __slots__ = ("__weakref__", "_whole", "tensor")

    def __init__(self, values: Tensor) -> None:
        # Nobody resizes or shares the storage of this tensor, so parts stay valid.
        self._whole: Tensor | None = values
        self.tensor: Tensor | None = _with_own_storage(values)
        """The buffer; None once it is released."""

    def part(self, view: Tensor) -> Tensor:
        """Return elements of the buffer as a tensor with a storage of its own.

        Args:
            view: of :attr:`tensor`, dense, real or complex.
        """
        if not view.numel():
            return torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
        values, tensor = self._whole, self.tensor
        assert values is not None, "released"
        assert tensor is not None, "released"
        start = (view.data_ptr() - tensor.data_ptr()) // view.element_size()
        piece: Any = as_elements(values, view)[start : start + view.numel()]
        # The storage of the part holds the piece, and so this record. It lives as long as its
        # memory is in use: else what `buffer_of` says would depend on when garbage is collected.
        piece.memory = self
        part = _with_own_storage(piece)
        _MEMORIES[part.device, part.data_ptr()] = self
        return part.as_strided(view.shape, view.stride())

    def release(self) -> None:
        """Let go of the memory; tensors that are parts of the buffer still hold it."""
        self._whole = self.tensor = None


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same memory, without gaps, as a tensor whose storage is exactly that memory."""
    return from_dlpack(to_dlpack(tensor)) if tensor.numel() else tensor


def as_elements(buffer: Tensor, like: Tensor) -> Tensor:
    """Return a buffer as real numbers or, where ``like`` is complex, as complex ones."""
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
"""By the device and the address of the first element of each part."""


def lazy_zeros(like: Tensor) -> Tensor:
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
