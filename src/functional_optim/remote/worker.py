"""Optimizer of one worker over the parameters of that worker."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_optim._torch.tensors import values_of, version_of
from functional_optim.engine.gradients import addends, check_and_unscale_, scale_
from functional_optim.engine.options import are_unchanged, options_of
from functional_optim.engine.recipes import OpaqueRecipe, Recipe, bind_recipe
from functional_optim.engine.stages import has_gates
from functional_optim.engine.states import own_copy
from functional_optim.remote.counters import Counters
from functional_optim.remote.snapshot import Reading
from functional_optim.remote.staleness import GradientVersions, StaleError, age, check_age
from functional_optim.remote.versions import Versions, param_versions

Options = Sequence[Mapping[str, Any]]
"""The options of each group of a worker."""

_ANY_AGE = GradientVersions()
"""Gradients of unknown versions, without a limit."""


class WorkerGroup(NamedTuple):
    """The parameters of one parameter group that a worker owns."""

    number: int
    """The index of the parameter group."""
    params: list[tuple[str, Any]]
    """Names, and parameters or references to them."""
    options: dict[str, Any]


class WorkerLock:
    """Lock around steps and reads of a worker's parameters, which records its owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: object = None

    @contextmanager
    def acquire(self, owner: object) -> Iterator[bool]:
        """Hold the lock in a ``with`` block, which gets True if it waited for another owner."""
        is_busy = not self._lock.acquire(blocking=False)
        waited = is_busy and self._owner is not owner
        if is_busy:
            self._lock.acquire()
        self._owner = owner
        try:
            yield waited
        finally:
            self._lock.release()


class Exchange(Protocol):
    """Interface between a worker's optimizer and the transport on that worker."""

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients that a source refers to, or None, for each parameter."""

    def versions_read(self, source: Any, params: Sequence[Tensor]) -> Sequence[int | None] | None:
        """Return the version of each parameter that the gradients are of; None if unknown."""
        return None

    def release(self, source: Any, params: Sequence[Tensor]) -> None:
        """Give back the versions that a source has read, if the caller does not give them back."""
        return

    def read(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Reading:
        """Return the current values of parameters, without their versions."""


class WorkerOptimizer:
    """Optimizer on a worker. Arguments and results of all methods can be sent."""

    def __init__(
        self,
        recipe: Recipe | OpaqueRecipe,
        worker_groups: Sequence[WorkerGroup],
        lock: WorkerLock,
        exchange: Exchange,
    ) -> None:
        self._params = [param for group in worker_groups for _, param in group.params]
        self._lock = lock
        self._exchange = exchange
        self._before: dict[str, Any] | None = None
        self._counts: dict[str, int] = dict.fromkeys(Counters._fields[:-1], 0)
        self._ages: dict[int, int] = {}
        self._caller_options: Options = [{}] * len(worker_groups)
        """The options of the last call; empty before the first call, and after a load."""
        opaque = isinstance(recipe, OpaqueRecipe)
        groups = [
            {**group.options, "params": [pair[1] if opaque else pair for pair in group.params]}
            for group in worker_groups
        ]
        with lock.acquire(self):
            # An opaque class may keep references to the memory of its parameters.
            self._versions = param_versions(self._params, movable=not opaque)
            self._local = bind_recipe(recipe, groups)
        self._has_gates = not isinstance(recipe, OpaqueRecipe) and has_gates(recipe.optimizer.links)
        """True if a step may write to a parameter without a gradient: gates keep gradients."""
        indices = {id(param): index for index, param in enumerate(self._params)}
        self._positions = [indices[id(param)] for param in self._local.params]
        """For each parameter of the optimizer, its index in ``_params``."""
        self._param_bytes = [_grad_bytes(param) for param in self._params]
        self._total_bytes = sum(self._param_bytes)

    def describe(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of totals that a step needs, and the options of each group."""
        hidden = self._local.state_keys
        groups = [
            {key: value for key, value in options_of(group).items() if key not in hidden}
            for group in self._local.param_groups
        ]
        return self._local.measured_stages, groups

    def read(self) -> Reading:
        """Return the current parameters. Later steps do not change them."""
        with self._lock.acquire(self):
            found = self._exchange.read(self._params, self._versions)
            self._count(reads=1, read_bytes=self._total_bytes, copied_bytes=found.copied_bytes)
            return found._replace(numbers=tuple(self._current_versions()))

    def check(self, source: Any, read_at: GradientVersions) -> None:
        """Raise StaleError if gradients are too old."""
        with self._lock.acquire(self):
            self._check_age(source, read_at)

    def step(
        self,
        source: Any,
        options: Options,
        measured: Sequence[Tensor] = (),
        read_at: GradientVersions = _ANY_AGE,
    ) -> None:
        """Make a step. Gradients that are too old raise StaleError, and nothing changes.

        ``options`` are those of the caller's groups, ``measured`` totals over all workers, and
        ``read_at`` the versions that the gradients are of.
        """
        with self._lock.acquire(self) as waited:
            grads = self._exchange.gradients(source, self._params)
            gradient_age = self._check_age(source, read_at)
            self._update_options(options)
            self._exchange.release(source, self._params)
            copied = self._copy_read_params(grads)
            before = list(map(version_of, self._params)) if self._has_gates else []
            self._local.step_by([grads[index] for index in self._positions], measured=measured)
            size = self._count_versions(grads, before)
            self._count(steps=1, waits=waited, gradient_bytes=size, copied_bytes=copied)
            if gradient_age is not None:
                self._ages[gradient_age] = self._ages.get(gradient_age, 0) + 1

    def measure(self, source: Any, options: Options, measured: Sequence[Tensor]) -> Tensor:
        """Return each parameter's addend to the next total. Options are as for :meth:`step`."""
        grads = self._exchange.gradients(source, self._params)
        with self._lock.acquire(self):
            self._update_options(options)
            ordered = [grads[index] for index in self._positions]
            rows = self._local.measure(ordered, measured=measured)
            return torch.empty_like(rows).index_copy_(0, torch.tensor(self._positions), rows)

    def addends(self, source: Any, order: float) -> Tensor:
        """Return each gradient's addend to a norm."""
        return addends(self._exchange.gradients(source, self._params), order)

    def scale_(self, source: Any, factor: float) -> None:
        scale_(self._exchange.gradients(source, self._params), factor)

    def unscale_(self, source: Any, scale: float) -> bool:
        """Divide gradients by a scale. Return True if some are not finite."""
        return check_and_unscale_(self._exchange.gradients(source, self._params), scale)

    def state_dict(self, options: Options) -> dict[str, Any]:
        """Return a copy of options and state in torch's format, with tensors on the CPU."""
        with self._lock.acquire(self):
            self._update_options(options)
            found: dict[str, Any] = own_copy(self._local.state_dict(), "cpu")
            return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and keep the previous state until :meth:`finish_load`."""
        with self._lock.acquire(self):
            before = own_copy(self._local.state_dict())
            self._forget_options()
            self._local.load_state_dict(own_copy(state_dict))
            self._before = before

    def finish_load(self, keep: bool) -> None:
        """Keep the loaded state, or restore the previous state."""
        before, self._before = self._before, None
        if not keep and before is not None:
            with self._lock.acquire(self):
                self._forget_options()
                self._local.load_state_dict(before)

    def counters(self) -> Counters:
        return Counters(**self._counts, staleness=dict(self._ages))

    def _copy_read_params(self, grads: Sequence[Tensor | None]) -> int:
        """Copy parameters with readers that the step may write to. Return the bytes copied."""
        copied = 0
        for k, one in enumerate(self._versions):
            if one.readers and (grads[k] is not None or self._has_gates):
                copied += one.copy_if_read(self._params[k])
        return copied

    def _count_versions(self, grads: Sequence[Tensor | None], before: Sequence[int]) -> int:
        """Count versions of parameters with gradients or writes. Return the bytes of gradients.

        ``before`` has autograd's version counters before the step; it is empty without gates.
        """
        size = 0
        for k, (one, grad) in enumerate(zip(self._versions, grads, strict=True)):
            if grad is not None:
                one.number += 1
                # A dense gradient has the shape and the dtype of its parameter.
                size += _grad_bytes(grad) if grad.is_sparse else self._param_bytes[k]
            elif before:
                one.number += version_of(self._params[k]) != before[k]
        return size

    def _check_age(self, source: Any, read_at: GradientVersions) -> int | None:
        """Return the age of gradients, or None if unknown. Raise StaleError if they are too old."""
        numbers = read_at.versions
        if numbers is None:
            numbers = self._exchange.versions_read(source, self._params)
        if numbers is None:
            return None
        found = age(numbers, self._current_versions())
        try:
            check_age(found, read_at.max_staleness)
        except StaleError:
            self._count(refused=1)
            raise
        return found

    def _current_versions(self) -> list[int]:
        """Return the version of each parameter: its number of steps."""
        return [one.number for one in self._versions]

    def _count(self, **added: int) -> None:
        for name, value in added.items():
            self._counts[name] += value

    def _update_options(self, options: Options) -> None:
        """Set the options that the caller has changed.

        A class of the user may change other entries of its groups in its steps, such as a count.
        """
        groups = self._local.param_groups
        # A class of the user may have fewer groups than it was given.
        for group, own, before in zip(groups, options, self._caller_options, strict=False):
            for name, value in own.items():
                if name not in before or not are_unchanged((before[name],), (value,)):
                    group[name] = value
        self._caller_options = options

    def _forget_options(self) -> None:
        """Set all options in the next call: a load has changed them."""
        self._caller_options = [{}] * len(self._caller_options)


def _grad_bytes(grad: Tensor) -> int:
    """Return the bytes of the stored elements of a tensor."""
    stored: Tensor = values_of(grad) if grad.is_sparse else grad
    return stored.nbytes
