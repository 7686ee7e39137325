"""Message of a call: all tensors in one flat buffer, and the rest pickled.

What is decoded lies in that buffer: who keeps or writes a tensor that others see copies it.
"""

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import indices_of, values_of
from functional_optim.remote.snapshot import Packed, packed, unpacked


class Message(NamedTuple):
    """Message that is sent."""

    head: bytes
    """By pickle, with the numbers of tensors in their places, and the tensors' kinds."""
    data: Tensor
    """All tensors: bytes, on the CPU."""


class TensorsAside(pickle.Pickler):
    """Puts dense tensors aside; one that comes twice has one place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The place of a dense tensor."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """A sparse tensor by its two dense parts."""
        if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
            # indices() and values() want it coalesced.
            parts = indices_of(value), values_of(value)
            return _sparse, (*parts, tuple(value.shape), value.is_coalesced())
        return NotImplemented


def encoded(value: Any, pickler: type[TensorsAside] = TensorsAside) -> Message:
    """A message of anything that the pickler can write; its tensors are copied once.

    Example::

        >>> message = encoded({"first": torch.ones(2), "second": torch.zeros(3)})
        >>> decoded(message)
        {'first': tensor([1., 1.]), 'second': tensor([0., 0., 0.])}
        >>> message.data.nbytes  # each begins at a multiple of 16 bytes
        32
    """
    file = io.BytesIO()
    writer = pickler(file)
    writer.dump(value)
    made = packed(writer.tensors)
    return Message(pickle.dumps((file.getvalue(), made.kinds), protocol=5), made.data)


def decoded(message: Message) -> Any:
    """Decode a message. Dense tensors are contiguous, leaves of autograd, on the CPU."""
    body, kinds = pickle.loads(message.head)  # noqa: S301  from a process that takes part
    return _Unpickler(io.BytesIO(body), unpacked(Packed(message.data, kinds))).load()


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        """The tensor that was put aside."""
        return self._tensors[place]


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
    )
