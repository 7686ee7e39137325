"""One worker's part: an optimizer over the parameters that live there."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import gradient_norms
from functional_optim.local_optimizer import Foreign, bound, options_of
from functional_optim.recipe import Recipe
from functional_optim.torch_checkpoint import own_copy

Options = Sequence[Mapping[str, Any]]
"""Of each of a worker's groups."""


class Share(NamedTuple):
    """A worker's part of one parameter group."""

    number: int
    """Of the group."""
    places: tuple[int, ...]
    """Of its parameters within the group."""
    params: list[tuple[str, Any]]
    """Names, and parameters, or what refers to them."""
    options: dict[str, Any]


class Counters(NamedTuple):
    """What was done on a worker for one optimizer."""

    steps: int
    """Made so far."""
    waits: int
    """Steps that had to wait until another one, of whichever optimizer, was made."""
    gradient_bytes: int
    """Of all gradients that were stepped."""


class Turn:
    """Held while parameters are stepped; it knows by whom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None

    @contextmanager
    def of(self, who: object) -> Iterator[bool]:
        """Hold it; whether someone else's turn had to end first."""
        waited = not self._lock.acquire(blocking=False)
        other = waited and self._holder is not who
        if waited:
            self._lock.acquire()
        self._holder = who
        try:
            yield other
        finally:
            self._lock.release()


class WorkerOptimizer:
    """What lives on a worker. All methods take and return what can be sent.

    Args:
        found: what makes the optimizer.
        shares: of all groups that have parameters here.
        turn: held by all whose steps must not overlap.
        gradients_of: finds the gradients of parameters, where the caller has them here.
    """

    def __init__(
        self,
        found: Recipe | Foreign,
        shares: Sequence[Share],
        turn: Turn,
        gradients_of: Callable[[Any, Sequence[Tensor]], list[Tensor | None]],
    ) -> None:
        self._params = [param for share in shares for _, param in share.params]
        self._turn = turn
        self._gradients_of = gradients_of
        self._before: dict[str, Any] | None = None
        self._counters = Counters(0, 0, 0)
        self._options: Any = None
        foreign = isinstance(found, Foreign)
        groups = [
            {**share.options, "params": [pair[1] if foreign else pair for pair in share.params]}
            for share in shares
        ]
        with turn.of(self):
            self._local = bound(found, groups)

    def about(self) -> tuple[int, list[dict[str, Any]]]:
        """How many totals a step needs, and the options of each group."""
        groups = [options_of(group) for group in self._local.param_groups]
        return self._local.measured_stages, groups

    def step(self, source: Any, options: Options, measured: Sequence[Tensor]) -> None:
        """One step.

        Args:
            source: of gradients: what ``gradients_of`` takes.
            options: of each group, from now on.
            measured: totals over all workers.
        """
        given = self._gradients_of(source, self._params)
        with self._turn.of(self) as waited:
            self._take(options)
            self._local.step(given, measured=measured)
            size = sum(_bytes_of(grad) for grad in given if grad is not None)
            before = self._counters
            self._counters = Counters(
                before.steps + 1, before.waits + waited, before.gradient_bytes + size
            )

    def measure(self, source: Any, options: Options, measured: Sequence[Tensor]) -> Tensor:
        """What each parameter adds to the next total."""
        given = self._gradients_of(source, self._params)
        with self._turn.of(self):
            self._take(options)
            return self._local.measure(given, measured=measured)

    def addends(self, source: Any, order: float) -> Tensor:
        """What each gradient adds to a norm."""
        return gradient_norms.addends(self._gradients_of(source, self._params), order)

    def scale_(self, source: Any, factor: float) -> None:
        """Multiply gradients."""
        gradient_norms.scale_(self._gradients_of(source, self._params), factor)

    def unscale_(self, source: Any, scale: float) -> bool:
        """Divide gradients by a scale; whether some are not finite."""
        return unscaled(self._gradients_of(source, self._params), scale)

    def state_dict(self, options: Options) -> dict[str, Any]:
        """A copy of options and state in torch's form, tensors on the CPU."""
        with self._turn.of(self):
            self._take(options)
            found: dict[str, Any] = _on_cpu(own_copy(self._local.state_dict()))
            return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over another state, and keep the one before until :meth:`settle`."""
        with self._turn.of(self):
            before = own_copy(self._local.state_dict())
            self._local.load_state_dict(state_dict)
            self._before, self._options = before, None

    def settle(self, keep: bool) -> None:
        """Keep what was loaded, or go back to what was before."""
        before, self._before = self._before, None
        if not keep and before is not None:
            with self._turn.of(self):
                self._local.load_state_dict(before)
                self._options = None

    def counters(self) -> Counters:
        """What was done so far."""
        return self._counters

    def _take(self, options: Options) -> None:
        """Options from the caller, where they are not those that it sent before."""
        if options == self._options:
            return
        # A class of the user's may keep fewer groups than it was given.
        for group, own in zip(self._local.param_groups, options, strict=False):
            group.update(own)
        self._options = options


def unscaled(gradients: Sequence[Tensor | None], scale: float) -> bool:
    """Divide gradients by a scale, in place; whether some are not finite."""
    number = torch.tensor(scale, dtype=torch.float64)
    return any(bool(one.item()) for one in gradient_norms.unscale_(gradients, number))


def _bytes_of(grad: Tensor) -> int:
    """Of the elements that a gradient holds."""
    held = grad._values() if grad.is_sparse else grad  # noqa: SLF001  values() wants it coalesced
    return held.numel() * held.element_size()


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    return value
