"""Tensors that are parts of one buffer, each with a storage of its own."""

from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack


class BufferMemory:
    """Memory of one buffer, and the tensors that are parts of the buffer.

    Programs that save tensors one by one (``safetensors``, ``pickle``) write the storage behind
    each tensor, or refuse tensors that share one. So a part has a storage of its own, which is
    exactly the elements of the part. That storage keeps the memory of the buffer alive.

    Args:
        tensor: the buffer, contiguous and in one dimension.

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

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        """The buffer; None once its parts are elsewhere."""

    def part(self, view: Tensor) -> Tensor:
        """Return the elements of a view of the buffer as a tensor with a storage of its own.

        Args:
            view: dense, of elements of this buffer, in any order; complex or real.
        """
        if not view.numel():
            return torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
        flat = from_dlpack(to_dlpack(view.as_strided((view.numel(),), (1,))))
        _MEMORIES[flat.device, flat.data_ptr()] = self
        return flat.as_strided(view.shape, view.stride())


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
