"""FlatBuffer: many parameters end to end in one 1-D tensor, and their positions."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_optim.core.buffer_memory import BufferMemory
from functional_optim.core.views import real_view


@dataclass(frozen=True, slots=True)
class Segment:
    """Position of one parameter's real view in a flat buffer."""

    index: int
    """The index of the parameter in the list of all parameters."""
    name: str
    offset: int
    """The first element in the buffer. An element of a complex parameter takes two elements."""
    numel: int
    """The number of elements in the buffer."""
    shape: torch.Size
    """The shape of the real view: ``(..., 2)`` for a complex parameter."""
    stride: tuple[int, ...]
    """The strides of the real view, which are those of the parameter before the move."""


class FlatBuffer:
    """A 1-D tensor with the values of many parameters. ``FlatLayout`` creates it.

    Args:
        data: the tensor.
        segments: the positions of the parameters, in the order of memory. Gaps are zero.
        key: the key of its parameters.
    """

    def __init__(self, data: Tensor, segments: tuple[Segment, ...], key: Hashable = None) -> None:
        self._memory = BufferMemory(data)
        self.segments = segments
        self.key = key
        self.numel = data.numel()
        self.dtype = data.dtype
        self.device = data.device

    def __repr__(self) -> str:
        return (
            f"FlatBuffer({len(self.segments)} parameters in {self.numel} elements of {self.dtype} "
            f"on {self.device}, key={self.key!r})"
        )

    @property
    def data(self) -> Tensor:
        """The tensor. A write to it changes the parameters."""
        data = self._memory.tensor
        if data is None:
            raise RuntimeError(
                "this flat buffer no longer holds its parameters: the layout was undone; make a "
                "new FlatLayout of them"
            )
        return data

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a tensor, one per segment, in the order of ``segments``."""
        _ = self.data
        if not isinstance(flat, Tensor):
            raise TypeError(f"flat must be a 1-D tensor, got {type(flat).__name__}")
        if flat.shape != (self.numel,) or not flat.is_contiguous():
            raise ValueError(
                f"flat must be a contiguous tensor of shape ({self.numel},), got shape "
                f"{tuple(flat.shape)} with strides {flat.stride()}"
            )
        start = int(flat.storage_offset())
        return [flat.as_strided(one.shape, one.stride, start + one.offset) for one in self.segments]

    def part(self, view: Tensor) -> Tensor:
        """Return the elements of a view of ``data`` as a tensor with a separate storage."""
        return self._memory.part(view)

    def release(self) -> None:
        """Release the memory. Afterwards, all methods raise an error."""
        self._memory.release()


def assign_segments(
    members: Sequence[tuple[int, str, Tensor]], align: int
) -> tuple[tuple[Segment, ...], int]:
    """Return the segments of parameters in one buffer, in this order, and the buffer's length.

    Segments begin at multiples of ``align``, and the length is a multiple of it.
    """
    segments = []
    end = 0
    for index, name, param in members:
        # A complex view can only begin at an even element.
        step = math.lcm(align, 2) if param.is_complex() else align
        offset = -(-end // step) * step
        view = real_view(param.detach())
        segments.append(Segment(index, name, offset, view.numel(), view.shape, view.stride()))
        end = offset + view.numel()
    return tuple(segments), -(-end // align) * align


def difference(tensor: Tensor, view: Tensor) -> str | None:
    """Return how a tensor differs from its view in layout or address; None if it does not."""
    for what, got, want in (
        ("dtype", tensor.dtype, view.dtype),
        ("device", tensor.device, view.device),
        ("layout", tensor.layout, view.layout),
        ("shape", tuple(tensor.shape), tuple(view.shape)),
    ):
        if got != want:
            return f"its {what} is {got}, it was {want}"
    if tensor.stride() != view.stride():
        return f"its strides are {tensor.stride()}, they were {view.stride()}"
    if tensor.is_conj() or tensor.is_neg() or tensor.data_ptr() != view.data_ptr():
        return "it is in other memory"
    return None
