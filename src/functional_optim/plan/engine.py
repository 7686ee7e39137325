"""Step of a list of checked leaves: coefficients, forms, executor, step counts.

Every step without a plan (of a tree, of parameter groups, of a bucket) calls these functions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import is_transforming
from functional_optim.core.aliasing import GivenMemory, apart_from, laid_as, storage_of
from functional_optim.core.capturing import check_not_captured
from functional_optim.core.compiling import uncompiled
from functional_optim.core.dtensors import is_sharded, placed_as
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.leaf import Leaf, Stepped, is_measured, require_kept, require_room
from functional_optim.core.local_shards import like
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, map_state, state_tensors
from functional_optim.core.views import ROWS, Form
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.reference import write
from functional_optim.plan.item import Item, Made, on_host
from functional_optim.plan.leaves import leaves_of, on_this_rank
from functional_optim.plan.reduction import complete


def _given(items: Sequence[Item], measured: Sequence[Tensor]) -> GivenMemory:
    """Return the memory of all tensor arguments of a step."""
    tensors = [tensor for item in items for tensor in (item.param, item.grad)]
    tensors += [tensor for item in items for tensor in state_tensors(item.state.stages)]
    return GivenMemory([*tensors, *measured])


def update(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    make: Callable[[Item], Made] | None = None,
) -> list[tuple[Tensor, LeafState]]:
    """Return new parameters and states. They share no memory with the items, which do not change.

    Arguments as for :func:`update_`.
    """
    check_not_captured(item.param for item in items)
    measured = complete(stages, executor, items, measured)
    before, items = items, on_this_rank(stages, executor, items)
    forms, leaves = leaves_of(stages, items, on_host(stages) if make is None else make)
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    given = _given(items, measured)

    def result(old: Tensor, new: Tensor) -> Tensor:
        return given.apart(laid_as(placed_as(new, old), old))

    results = []
    stepped = defer_interrupts(executor.update, stages, entered, measured)
    for item, form, leaf, seen, one in zip(items, forms, leaves, entered, stepped, strict=True):
        require_kept(seen, one)
        param, states = form.leave(leaf, one)
        pairs = zip(item.state.stages, states, strict=True)
        states = tuple(map_state(result, old, new) for old, new in pairs)
        results.append((result(item.param, param), LeafState(item.state.step + 1, states)))
    return [_whole(item, *made) for item, made in zip(before, results, strict=True)]


def _whole(item: Item, param: Tensor, state: LeafState) -> tuple[Tensor, LeafState]:
    """Return the results of an item, as DTensors if the item has DTensors."""
    if not is_sharded(item.param) or is_sharded(param):
        return param, state
    states = tuple(map(like, item.state.stages, state.stages))
    return like(item.param, param), state._replace(stages=states)


@uncompiled
def update_(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    make: Callable[[Item], Made] | None = None,
) -> None:
    """Step in place, with interrupts deferred.

    Args:
        stages: of the chain.
        executor: that steps them.
        items: to be stepped.
        measured: the known totals.
        make: returns the coefficients of an item; None to compute them on the host, which a CUDA
            graph cannot capture.

    Raises:
        RuntimeError, KernelError: as for :func:`prepared`; nothing has changed.
    """
    # All of it: where an interrupt meets the end of a with statement, what was switched off there
    # stays off.
    defer_interrupts(_updated, stages, executor, items, measured, make)


def _updated(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made] | None,
) -> None:
    with torch.no_grad():
        measured = complete(stages, executor, items, measured, make)
    _entered(stages, executor, items, make, measured).write(stages, executor, measured, counts=True)


def prepared(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    make: Callable[[Item], Made] | None = None,
    *,
    counts: bool = True,
) -> Callable[[], None]:
    """Bind the step of :func:`update_`. All errors are raised now.

    Args:
        stages, executor, items, measured, make: as for :func:`update_`.
        counts: True if the step counts increase.

    Raises:
        RuntimeError: a sparse gradient that the stages cannot take; a CUDA graph is being captured.
        KernelError: the executor cannot step an item.
    """
    with torch.no_grad():
        measured = complete(stages, executor, items, measured, make)
    entered = defer_interrupts(_entered, stages, executor, items, make, measured)
    return partial(defer_interrupts, entered.write, stages, executor, measured, counts)


def require(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    make: Callable[[Item], Made],
) -> None:
    """Make sure that an executor can step leaves like these. Nothing is stepped.

    Args:
        stages, executor, make: as for :func:`prepared`.
        items: leaves, one of each kind.

    Raises:
        RuntimeError, KernelError: as for :func:`prepared`.
    """
    defer_interrupts(_entered, stages, executor, items, make, ())


def totals(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    make: Callable[[Item], Made] | None,
    measured: Sequence[Tensor],
) -> list[Tensor]:
    """Return the totals of all measured stages of a step, for a caller that steps items in parts.

    Args:
        stages, executor, items, make: as for :func:`prepared`. The errors are the same, too.
        measured: the known totals.
    """
    with torch.no_grad():
        found = complete(stages, executor, items, measured, make)
    seen = _entered(stages, executor, items, make, measured).seen
    with torch.no_grad():
        return _all_totals(stages, executor, seen, found)


def _all_totals(
    stages: Sequence[Stage], executor: Executor, seen: Sequence[Leaf], measured: Sequence[Tensor]
) -> list[Tensor]:
    """Return the totals of all measured stages: the known totals, then sums over these leaves."""
    found = list(measured)
    for _ in range(sum(map(is_measured, stages)) - len(found)):
        found.append(executor.measure(stages, seen, found))
    return found


class _Entered(NamedTuple):
    """Items of a step in place, as an executor takes them."""

    given: Sequence[Item]
    items: Sequence[Item]
    """For DTensors, the shards of this rank."""
    forms: list[Form]
    leaves: list[Leaf]
    seen: list[Leaf]
    """The leaves in the form that the executor steps."""
    results: list[Stepped] | None
    """Inside torch.func, the values to be written, computed early so that errors come early."""

    def _one_writes_rows_of_another(self) -> bool:
        """Return True if sparse rows were copied from parameters that share memory.

        The rows of each parameter must then be copied after the earlier parameters were stepped.
        """
        if self.results is not None or ROWS not in self.forms or len(self.items) < 2:
            return False
        storages = [storage_of(item.param) for item in self.items]
        return len(set(storages)) < len(storages)

    def write(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        measured: Sequence[Tensor],
        counts: bool,
    ) -> None:
        """Step them, in place."""
        with torch.no_grad():
            if self._one_writes_rows_of_another():
                sums = _all_totals(stages, executor, self.seen, measured)
                for form, leaf in zip(self.forms, self.leaves, strict=True):
                    seen = form.enter(leaf)
                    executor.update_(stages, [seen], sums)
                    form.write(leaf, seen)
            else:
                self._write_all(stages, executor, measured)
            for item in self.items if counts else ():
                item.state.step.add_(1)
            if self.given is not self.items:  # autograd counts DTensors apart from their shards
                torch.autograd.graph.increment_version([one.param for one in self.given])

    def _write_all(
        self, stages: Sequence[Stage], executor: Executor, measured: Sequence[Tensor]
    ) -> None:
        if self.results is None:
            executor.update_(stages, self.seen, measured)
        else:
            for one in zip(self.seen, self.results, strict=True):
                write(*one)
        for form, leaf, seen in zip(self.forms, self.leaves, self.seen, strict=True):
            form.write(leaf, seen)


def _entered(
    stages: Sequence[Stage],
    executor: Executor,
    given: Sequence[Item],
    make: Callable[[Item], Made] | None,
    measured: Sequence[Tensor],
) -> _Entered:
    if make is None:
        check_not_captured(item.param for item in given)
        make = on_host(stages)
    with torch.no_grad():
        local = on_this_rank(stages, executor, given)
        items = _gradients_apart(local)
        given = items if local is given else given
    forms, leaves = leaves_of(stages, items, make)  # numbers keep the derivatives that they carry
    with torch.no_grad():
        seen = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
        executor.require(stages, seen)
        results = None
        if is_transforming():
            results = executor.update(stages, seen, measured)
            for one in zip(seen, results, strict=True):
                require_room(*one)
    return _Entered(given, items, forms, leaves, seen, results)


def _gradients_apart(items: Sequence[Item]) -> Sequence[Item]:
    """Return items whose gradients are copied if a step of another item writes to them."""
    grads = [item.grad for item in items]
    written = [one for item in items for one in (item.param, *state_tensors(item.state.stages))]
    apart = apart_from(grads, written) if len(items) > 1 else grads
    if apart is grads:
        return items
    return [item._replace(grad=one) for item, one in zip(items, apart, strict=True)]
