"""Part of one worker: an optimizer over its parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import values_of, version_of
from functional_optim.core.links import has_gates
from functional_optim.frontends import gradient_norms
from functional_optim.frontends.local_optimizer import Foreign, bound
from functional_optim.frontends.loss_scale import unscaled
from functional_optim.frontends.recipe import Recipe
from functional_optim.frontends.torch_checkpoint import own_copy
from functional_optim.frontends.torch_groups import options_of
from functional_optim.remote.counters import Counters
from functional_optim.remote.exchange import Exchange
from functional_optim.remote.options import MissingOptionsError, Numbered, Sent
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.staleness import GradientVersions, StaleError, age, check_age
from functional_optim.remote.turn import Turn
from functional_optim.remote.versions import versions_of

_UNKNOWN = GradientVersions()
"""Gradients of any version."""


class Share(NamedTuple):
    """A worker's part of one parameter group."""

    number: int
    """Of the group."""
    places: tuple[int, ...]
    """Of its parameters within the group."""
    params: list[tuple[str, Any]]
    """Names, and parameters, or what refers to them."""
    options: dict[str, Any]


class WorkerOptimizer:
    """Optimizer on a worker. All methods take and return what can be sent.

    Args:
        found: what makes the optimizer.
        shares: of all groups that have parameters here.
        turn: held by all whose steps must not overlap.
        exchange: finds the gradients of parameters, and hands the parameters to readers.
    """

    def __init__(
        self,
        found: Recipe | Foreign,
        shares: Sequence[Share],
        turn: Turn,
        exchange: Exchange,
    ) -> None:
        self._params = [param for share in shares for _, param in share.params]
        self._turn = turn
        self._exchange = exchange
        self._before: dict[str, Any] | None = None
        self._counted: dict[str, int] = dict.fromkeys(Counters._fields[:-1], 0)
        self._ages: dict[int, int] = {}
        self._version = 0  # of the options that it has; none are sent by this number
        foreign = isinstance(found, Foreign)
        groups = [
            {**share.options, "params": [pair[1] if foreign else pair for pair in share.params]}
            for share in shares
        ]
        with turn.of(self):
            # Nobody knows what an unknown class keeps of its parameters' memory.
            self._versions = versions_of(self._params, movable=not foreign)
            self._local = bound(found, groups)
        self._may_be_late = not isinstance(found, Foreign) and has_gates(found.optimizer.links)
        """Whether a step may write to a parameter without a gradient: a gate lets through what it
        has kept."""
        places = {id(param): place for place, param in enumerate(self._params)}
        self._places = [places[id(param)] for param in self._local.params]
        """For each parameter of the optimizer, its place among the parameters of the shares."""
        self._sizes = [_bytes_of(param) for param in self._params]
        self._size = sum(self._sizes)

    def about(self) -> tuple[int, list[dict[str, Any]]]:
        """Return how many totals a step needs, and the options of each group."""
        groups = [options_of(group) for group in self._local.param_groups]
        return self._local.measured_stages, groups

    def read(self) -> Reading:
        """The parameters as they are now, for a reader whom no step disturbs."""
        with self._turn.of(self):
            found = self._exchange.handed(self._params, self._versions)
            self._count(reads=1, read_bytes=self._size, copied_bytes=found.copied_bytes)
            return Reading(found.values, tuple(self._now()), found.lease)

    def check(self, source: Any, taken: GradientVersions) -> None:
        """Return True if gradients are young enough to be applied.

        Raises:
            StaleError: they are not.
        """
        with self._turn.of(self):
            self._age(source, taken)

    def step(
        self,
        source: Any,
        options: Sent,
        measured: Sequence[Tensor] = (),
        taken: GradientVersions = _UNKNOWN,
    ) -> None:
        """Make a step.

        Args:
            source: of gradients: what the exchange takes.
            options: of each group, from now on.
            measured: totals over all workers.
            taken: of which version the gradients are.

        Raises:
            StaleError: of one that is too old; nothing is changed then.
            MissingOptionsError: it does not have the options of this version; likewise.
        """
        with self._turn.of(self) as waited:
            given = self._exchange.gradients(source, self._params)
            found = self._age(source, taken)
            self._take(options)
            self._exchange.done(source, self._params)
            copied, before = self._made_way(given), self._writes()
            self._local.step([given[place] for place in self._places], measured=measured)
            size = self._stepped(given, before)
            self._count(steps=1, waits=waited, gradient_bytes=size, copied_bytes=copied)
            if found is not None:
                self._ages[found] = self._ages.get(found, 0) + 1

    def measure(self, source: Any, options: Sent, measured: Sequence[Tensor]) -> Tensor:
        """Return each parameter's addend to the next total.

        Raises:
            MissingOptionsError: as for :meth:`step`.
        """
        given = self._exchange.gradients(source, self._params)
        with self._turn.of(self):
            self._take(options)
            ordered = [given[place] for place in self._places]
            rows = self._local.measure(ordered, measured=measured)
            return torch.empty_like(rows).index_copy_(0, torch.tensor(self._places), rows)

    def addends(self, source: Any, order: float) -> Tensor:
        """Return each gradient's addend to a norm."""
        return gradient_norms.addends(self._exchange.gradients(source, self._params), order)

    def scale_(self, source: Any, factor: float) -> None:
        """Multiply gradients."""
        gradient_norms.scale_(self._exchange.gradients(source, self._params), factor)

    def unscale_(self, source: Any, scale: float) -> bool:
        """Divide gradients by a scale; whether some are not finite."""
        return unscaled(self._exchange.gradients(source, self._params), scale)

    def state_dict(self, options: Numbered) -> dict[str, Any]:
        """A copy of options and state in torch's form, tensors on the CPU."""
        with self._turn.of(self):
            self._take(options)
            found: dict[str, Any] = _on_cpu(own_copy(self._local.state_dict()))
            return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over another state, and keep the one before until :meth:`settle`."""
        with self._turn.of(self):
            before = own_copy(self._local.state_dict())
            self._local.load_state_dict(own_copy(state_dict))
            self._before, self._version = before, 0

    def settle(self, keep: bool) -> None:
        """Keep what was loaded, or go back to what was before."""
        before, self._before = self._before, None
        if not keep and before is not None:
            with self._turn.of(self):
                self._local.load_state_dict(before)
                self._version = 0

    def counters(self) -> Counters:
        """Return the counters so far."""
        return Counters(**self._counted, staleness=dict(self._ages))

    def _made_way(self, given: Sequence[Tensor | None]) -> int:
        """Leave what somebody reads to its readers, where it is about to be written to.

        Returns:
            The bytes that were copied.
        """
        copied = 0
        for k, one in enumerate(self._versions):
            if one.readers and (given[k] is not None or self._may_be_late):
                copied += one.make_way(self._params[k])
        return copied

    def _writes(self) -> list[int]:
        """Return how often each parameter was written to, where one without a gradient may be."""
        return list(map(version_of, self._params)) if self._may_be_late else []

    def _stepped(self, given: Sequence[Tensor | None], before: Sequence[int]) -> int:
        """Count the step of each parameter that has a gradient, or was written to without one.

        Args:
            given: the gradients.
            before: :meth:`_writes` before the step.

        Returns:
            The bytes of all gradients.
        """
        size = 0
        for one, grad, old, new in zip(self._versions, given, before, self._writes(), strict=False):
            one.number += grad is None and old != new
        for one, own, grad in zip(self._versions, self._sizes, given, strict=True):
            if grad is not None:
                one.number += 1
                # What was stepped has the shape and the dtype of its parameter.
                size += _bytes_of(grad) if grad.is_sparse else own
        return size

    def _age(self, source: Any, taken: GradientVersions) -> int | None:
        """Return the age of gradients; None if it is not known.

        Raises:
            StaleError: too old.
        """
        numbers = taken.numbers
        if numbers is None:
            numbers = self._exchange.numbers(source, self._params)
        if numbers is None:
            return None
        found = age(numbers, self._now())
        try:
            check_age(found, taken.most)
        except StaleError:
            self._count(refused=1)
            raise
        return found

    def _now(self) -> list[int]:
        """The step that each parameter is at."""
        return [one.number for one in self._versions]

    def _count(self, **added: int) -> None:
        """Add to the counters."""
        for name, value in added.items():
            self._counted[name] += value

    def _take(self, options: Sent) -> None:
        """Options from the caller, where they are not those that it sent before.

        Raises:
            MissingOptionsError: the caller has sent their version alone, and it is another one.
        """
        if isinstance(options, int):
            if options != self._version:
                raise MissingOptionsError(
                    f"there are no options of version {options} here, but {self._version}"
                )
            return
        # A class of the user's may keep fewer groups than it was given.
        for group, own in zip(self._local.param_groups, options.groups, strict=False):
            group.update(own)
        self._version = options.version


def _bytes_of(grad: Tensor) -> int:
    """Return the bytes of the elements that a gradient holds."""
    held = values_of(grad) if grad.is_sparse else grad
    return held.numel() * held.element_size()


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    return value
