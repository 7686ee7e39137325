"""Ray actor: a worker, and the optimizer over its parameters."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functional_optim.frontends.local_optimizer import Foreign
from functional_optim.frontends.recipe import Recipe
from functional_optim.frontends.torch_checkpoint import own_copy
from functional_optim.remote.answers import sendable
from functional_optim.remote.exchange import Handed
from functional_optim.remote.ray_message import RayMessage, decoded, encoded
from functional_optim.remote.turn import Turn
from functional_optim.remote.versions import Versions
from functional_optim.remote.worker import Share, WorkerOptimizer


class Actor:
    """A worker: it keeps what is placed on it, and makes one call after the other.

    What it is sent and what it answers are messages; what a call raises is an answer too.

    Args:
        worker: its name.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._placed: dict[int, Any] = {}

    def place(self, number: int, forgotten: Sequence[int], message: RayMessage) -> RayMessage:
        """Keep, under a number, what ``make(*args)`` of a message returns."""
        return self._answered(
            forgotten, message, lambda make, args: self._keep(number, make(*args))
        )

    def call(self, number: int, forgotten: Sequence[int], message: RayMessage) -> RayMessage:
        """Call a method of what has a number, both method and arguments from a message."""
        return self._answered(
            forgotten, message, lambda method, args: getattr(self._placed[number], method)(*args)
        )

    def _answered(
        self, forgotten: Sequence[int], message: RayMessage, call: Callable[[Any, Any], Any]
    ) -> RayMessage:
        """Return the result or the error of a call, after dropping objects without references."""
        for one in forgotten:
            self._placed.pop(one, None)
        try:
            return encoded(call(*decoded(message)))
        except Exception as error:  # noqa: BLE001  raised where it was called from
            return encoded(sendable(error, self._worker))

    def _keep(self, number: int, value: Any) -> None:
        self._placed[number] = value


class InActor:
    """Gradients are read in Ray's memory, and readers are sent what is encoded next.

    Args:
        copies: whether gradients are copied first, for a class that may write to them.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients that were sent."""
        found: list[Tensor | None] = own_copy(list(source)) if self._copies else list(source)
        return found

    def numbers(self, source: Any, params: Sequence[Tensor]) -> None:
        """Known by the caller alone."""

    def done(self, source: Any, params: Sequence[Tensor]) -> None:
        """Nothing: readers have copies."""

    def handed(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Handed:
        """The parameters: they are copied into the answer before the next call."""
        return Handed(list(params), None, sum(one.numel() * one.element_size() for one in params))


def make_worker(found: Recipe | Foreign, shares: Sequence[Share]) -> WorkerOptimizer:
    """The optimizer over copies of the parameters that were sent, which live here from now on."""
    made: dict[int, Tensor] = {}

    def kept(param: Tensor) -> Tensor:
        if id(param) not in made:
            made[id(param)] = own_copy(param).requires_grad_(param.requires_grad)
        return made[id(param)]

    shares = [
        share._replace(params=[(name, kept(param)) for name, param in share.params])
        for share in shares
    ]
    return WorkerOptimizer(found, shares, Turn(), InActor(copies=isinstance(found, Foreign)))
