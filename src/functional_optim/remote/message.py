"""Message of a call: all tensors in one flat buffer, and the rest pickled.

Decoded tensors are views of that buffer. Copy them before you write to them or keep them.
"""

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.tensors import indices_of, values_of
from functional_optim.remote.snapshot import Packed, pack, unpack


class Message(NamedTuple):
    """Message of a call."""

    head: bytes
    """The pickled value, with numbers in place of tensors, and the specs of the tensors."""
    data: Tensor
    """All tensors, as bytes, on the CPU."""


class TensorPickler(pickle.Pickler):
    """Pickler that replaces each dense tensor by a number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """Reduce a sparse tensor to its two dense parts."""
        if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
            # The methods indices() and values() raise unless the tensor is coalesced.
            parts = indices_of(value), values_of(value)
            return _sparse, (*parts, tuple(value.shape), value.is_coalesced())
        return NotImplemented


def encode(value: Any, pickler: type[TensorPickler] = TensorPickler) -> Message:
    """Return a message of any value that the pickler supports. Its tensors are copied once."""
    file = io.BytesIO()
    writer = pickler(file)
    writer.dump(value)
    made = pack(writer.tensors)
    return Message(pickle.dumps((file.getvalue(), made.specs), protocol=5), made.data)


def decode(message: Message) -> Any:
    """Decode a message. Dense tensors are contiguous leaves of autograd on the CPU."""
    body, specs = pickle.loads(message.head)  # noqa: S301  from a process that takes part
    return _Unpickler(io.BytesIO(body), unpack(Packed(message.data, specs))).load()


class _Unpickler(pickle.Unpickler):
    """Unpickler that replaces numbers by tensors."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
    )
