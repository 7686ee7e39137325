"""Messages over Ray.

It puts an array of bytes into its shared memory, and hands that to the receiver there, without a
copy.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from ray import cloudpickle

from functional_optim.remote import message
from functional_optim.remote.message import TensorsAside


class RayMessage(NamedTuple):
    """Message that is sent through Ray."""

    head: bytes
    data: Any
    """All tensors: an array of bytes."""


def encoded(value: Any) -> RayMessage:
    """A message of anything that cloudpickle can write; its tensors are copied once."""
    made = message.encoded(value, _Pickler)
    return RayMessage(made.head, made.data.numpy())


def decoded(given: RayMessage) -> Any:
    """Decode a message: see :func:`functional_optim.remote.message.decoded`."""
    memory = torch.from_numpy(np.asarray(_Memory(given.data)))
    return message.decoded(message.Message(given.head, memory))


class _Pickler(TensorsAside, cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray's is not annotated
    """Functions and classes of a script by value."""

    def reducer_override(self, value: Any) -> Any:
        found = TensorsAside.reducer_override(self, value)
        if found is NotImplemented:
            found = cloudpickle.CloudPickler.reducer_override(self, value)
        return found


class _Memory:
    """An array that Ray has marked as read-only, of which torch would warn; nobody writes there."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        known: dict[str, Any] = self._array.__array_interface__
        return {**known, "data": (known["data"][0], False)}
