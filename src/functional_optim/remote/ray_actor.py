"""Ray actor: a worker and its optimizer, and the messages that it exchanges."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor

from functional_optim.engine.recipes import OpaqueRecipe, Recipe
from functional_optim.engine.states import own_copy
from functional_optim.remote import message
from functional_optim.remote.futures import encode_error
from functional_optim.remote.message import TensorPickler
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.versions import Versions
from functional_optim.remote.worker import Exchange, WorkerGroup, WorkerLock, WorkerOptimizer


class RayMessage(NamedTuple):
    """Message that Ray sends. Ray shares the array with receivers on the same machine."""

    head: bytes
    data: Any
    """All tensors, as an array of bytes."""


def encode(value: Any) -> RayMessage:
    """Return a message of anything that cloudpickle can pickle. Its tensors are copied once."""
    made = message.encode(value, _Pickler)
    return RayMessage(made.head, made.data.numpy())


def decode(sent: RayMessage) -> Any:
    """Decode a message: see :func:`functional_optim.remote.message.decode`."""
    memory = torch.from_numpy(np.asarray(_WritableArray(sent.data)))
    return message.decode(message.Message(sent.head, memory))


class _Pickler(TensorPickler, cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray's is not annotated
    """Pickler that sends functions and classes of a script by value."""

    def reducer_override(self, value: Any) -> Any:
        found = TensorPickler.reducer_override(self, value)
        if found is NotImplemented:
            found = cloudpickle.CloudPickler.reducer_override(self, value)
        return found


class _WritableArray:
    """View of a read-only array of Ray, marked as writable: torch warns about read-only arrays.

    Nobody writes to the array.
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._array.__array_interface__
        return {**interface, "data": (interface["data"][0], False)}


class Actor:
    """Worker that keeps placed objects, and makes one call at a time.

    Arguments and results are messages. An error of a call is sent as its result.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._placed: dict[int, Any] = {}

    def place(self, number: int, forgotten: Sequence[int], message: RayMessage) -> RayMessage:
        """Keep the result of ``make(*args)``, both from a message, under a number."""
        return self._run(
            forgotten, message, lambda make, args: self._placed.update({number: make(*args)})
        )

    def call(self, number: int, forgotten: Sequence[int], message: RayMessage) -> RayMessage:
        """Call a method of the object with this number. The message has method and arguments."""
        return self._run(
            forgotten, message, lambda method, args: getattr(self._placed[number], method)(*args)
        )

    def _run(
        self, forgotten: Sequence[int], message: RayMessage, call: Callable[[Any, Any], Any]
    ) -> RayMessage:
        """Drop objects without references, run a call, and return its result or its error."""
        for one in forgotten:
            self._placed.pop(one, None)
        try:
            return encode(call(*decode(message)))
        except Exception as error:  # noqa: BLE001  the caller raises it
            return encode(encode_error(error, self._worker))


class ActorExchange(Exchange):
    """Exchange with gradients in Ray's shared memory, and readers that get copies.

    Args:
        copies: True if gradients must be copied, because an opaque class may write to them.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        found: list[Tensor | None] = own_copy(list(source)) if self._copies else list(source)
        return found

    def read(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Reading:
        """Return the parameters. They are copied into the answer before the next call."""
        return Reading(list(params), None, sum(one.nbytes for one in params))


def make_actor_worker(
    recipe: Recipe | OpaqueRecipe, groups: Sequence[WorkerGroup]
) -> WorkerOptimizer:
    """Return the optimizer over copies of the parameters that were sent."""

    def copy(name: str, param: Tensor) -> tuple[str, Tensor]:
        return name, param.detach().clone().requires_grad_(param.requires_grad)

    groups = [one._replace(params=[copy(*pair) for pair in one.params]) for one in groups]
    exchange = ActorExchange(copies=isinstance(recipe, OpaqueRecipe))
    return WorkerOptimizer(recipe, groups, WorkerLock(), exchange)
