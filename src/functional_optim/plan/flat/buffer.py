"""A flat buffer: many parameters end to end in one 1-D tensor, and where each of them lies."""

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
    """Its place in the list of parameters that the layout was given."""
    name: str
    offset: int
    """Where it begins, in elements of the buffer. A complex parameter takes two per element."""
    numel: int
    """How many elements of the buffer it takes."""
    shape: torch.Size
    """The shape of its real view: ``(..., 2)`` for a complex parameter."""
    stride: tuple[int, ...]
    """The strides of its real view, as they were before."""


class FlatBuffer:
    """Flat buffer: a 1-D tensor with the values of many parameters. Made by ``FlatLayout``.

    Args:
        data: the tensor.
        segments: what it holds, in the order of memory; gaps between segments are zero.
        key: the key that its parameters were given.

    Example::

        >>> import torch
        >>> from functional_optim.plan.flat.layout import FlatLayout
        >>> params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(1, 3))]
        >>> buffer = FlatLayout(params, ["a", "b"]).buffers[0]
        >>> buffer.data
        tensor([1., 1., 0., 0., 0.])
        >>> [(one.name, one.offset) for one in buffer.segments]
        [('a', 0), ('b', 2)]
        >>> [tuple(view.shape) for view in buffer.views(torch.arange(5))]
        [(2,), (1, 3)]
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
        """The values of all its parameters: what is written here, the parameters hold.

        Raises:
            RuntimeError: the layout was undone, so that the parameters live elsewhere.
        """
        data = self._memory.tensor
        if data is None:
            raise RuntimeError(
                "this flat buffer no longer holds its parameters: the layout was undone; make a "
                "new FlatLayout of them"
            )
        return data

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor of this length, one per segment, in the order of ``segments``.

        Args:
            flat: a 1-D tensor of ``numel`` elements, of any dtype and on any device: this
                buffer, its gradients, a field of the state.

        Returns:
            Views in the segments' shapes and strides; real ones, for complex parameters too.

        Raises:
            TypeError: no tensor.
            ValueError: another number of dimensions or elements, or elements that are not side by
                side.
            RuntimeError: the layout was undone.
        """
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
        """Return the elements of a view of ``data`` as a tensor with a storage of its own."""
        return self._memory.part(view)

    def retire(self) -> None:
        """Let go of the memory; from now on, the buffer answers with an error."""
        self._memory.release()


@dataclass(frozen=True, slots=True)
class ParamToPlace:
    """A parameter that is to have a place in a buffer."""

    index: int
    name: str
    param: Tensor


def place(members: Sequence[ParamToPlace], align: int) -> tuple[tuple[Segment, ...], int]:
    """Segments for parameters of one buffer, in this order, and the buffer's length.

    It ends at a multiple of ``align`` too.
    """
    segments = []
    end = 0
    for member in members:
        param = member.param
        # A complex view can only begin at an even element.
        step = math.lcm(align, 2) if param.is_complex() else align
        offset = -(-end // step) * step
        view = real_view(param.detach())
        segments.append(
            Segment(member.index, member.name, offset, view.numel(), view.shape, view.stride())
        )
        end = offset + view.numel()
    return tuple(segments), -(-end // align) * align


def difference(tensor: Tensor, view: Tensor) -> str | None:
    """In what a tensor is not the same piece of memory as its view; None where it is."""
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
