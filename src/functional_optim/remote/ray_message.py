"""One message: all tensors of a call in one flat buffer, and the rest as pickle makes it.

Ray puts an array of bytes into its shared memory and hands it to the receiver there, without a
copy. What is decoded lies in that memory: who keeps or writes a tensor copies it.
"""

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor

from functional_optim._torch import indices_of, values_of
from functional_optim.remote.snapshot import Packed, packed, unpacked


class Message(NamedTuple):
    """What is sent."""

    head: bytes
    """By pickle, with the numbers of tensors in their places, and the tensors' kinds."""
    data: Any
    """All tensors: an array of bytes."""


def encoded(value: Any) -> Message:
    """A message of anything that cloudpickle can write; its tensors are copied once.

    Example::

        >>> message = encoded({"first": torch.ones(2), "second": torch.zeros(3)})
        >>> decoded(message)
        {'first': tensor([1., 1.]), 'second': tensor([0., 0., 0.])}
        >>> message.data.nbytes  # each begins at a multiple of 16 bytes
        32
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    made = packed(pickler.tensors)
    head = pickle.dumps((file.getvalue(), made.kinds), protocol=5)
    return Message(head, made.data.numpy())


def decoded(message: Message) -> Any:
    """What was encoded. Dense tensors are contiguous, leaves of autograd, on the CPU."""
    head, data = message
    body, kinds = pickle.loads(head)  # noqa: S301  from a process of the same cluster
    memory = torch.from_numpy(np.asarray(_Memory(data)))
    return _Unpickler(io.BytesIO(body), unpacked(Packed(memory, kinds))).load()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray's is not annotated
    """Puts tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The place of a dense tensor; one that comes twice has one place."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """A sparse tensor by its two dense parts."""
        if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
            parts = indices_of(value), values_of(value)
            return _sparse, (*parts, tuple(value.shape), value.is_coalesced())
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        """The tensor that was put aside."""
        return self._tensors[place]


class _Memory:
    """An array that Ray has marked as read-only, of which torch would warn; nobody writes there."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        known: dict[str, Any] = self._array.__array_interface__
        return {**known, "data": (known["data"][0], False)}


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
    )
