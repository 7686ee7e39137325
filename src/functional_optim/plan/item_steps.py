"""Step of a list of checked leaves: coefficients, forms, executor, step counts.

Every step without a plan (of a tree, of parameter groups, of a bucket) calls these functions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.compilers import has_dispatch_mode
from functional_optim._torch.derivatives import is_transforming
from functional_optim.core.aliasing import AliasTracker, clone_aliased, match_strides, storage_key
from functional_optim.core.dtensors import is_dtensor, redistribute_like
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.leaf import Leaf, Stepped, check_kept, check_vmap_levels, is_measured
from functional_optim.core.local_shards import wrap_like
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, map_state, state_tensors
from functional_optim.core.views import ROWS, Form
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.reference import write
from functional_optim.plan.item import Item, StepScalars, on_host
from functional_optim.plan.leaves import leaves_of, on_this_rank
from functional_optim.plan.reduction import complete


def update(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    scalars_of: Callable[[Item], StepScalars] | None = None,
) -> list[tuple[Tensor, LeafState]]:
    """Return new parameters and states, which share no memory with the items."""
    check_not_captured(item.param for item in items)
    measured = complete(stages, executor, items, measured)
    before, items = items, on_this_rank(stages, executor, items)
    forms, leaves = leaves_of(stages, items, on_host(stages) if scalars_of is None else scalars_of)
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    if not torch.compiler.is_compiling() and not has_dispatch_mode():
        executor.require(stages, entered)
    tensors = [tensor for item in items for tensor in (item.param, item.grad)]
    tensors += [tensor for item in items for tensor in state_tensors(item.state.stages)]
    given = AliasTracker([*tensors, *measured])

    def result(old: Tensor, new: Tensor) -> Tensor:
        return given.copy_if_aliased(match_strides(redistribute_like(new, old), old))

    results = []
    stepped = defer_interrupts(executor.update, stages, entered, measured)
    for item, form, leaf, seen, one in zip(items, forms, leaves, entered, stepped, strict=True):
        check_kept(seen, one)
        param, states = form.leave(leaf, one)
        pairs = zip(item.state.stages, states, strict=True)
        states = tuple(map_state(result, old, new) for old, new in pairs)
        results.append((result(item.param, param), LeafState(item.state.step + 1, states)))
    return [_wrap_results(item, *made) for item, made in zip(before, results, strict=True)]


def _wrap_results(item: Item, param: Tensor, state: LeafState) -> tuple[Tensor, LeafState]:
    """Return the results of an item, as DTensors if the item has DTensors."""
    if not is_dtensor(item.param) or is_dtensor(param):
        return param, state
    states = tuple(map(wrap_like, item.state.stages, state.stages))
    return wrap_like(item.param, param), state._replace(stages=states)


@disable_compile
def update_(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    scalars_of: Callable[[Item], StepScalars] | None = None,
) -> None:
    """Step in place, with interrupts deferred.

    ``scalars_of`` returns the coefficients of an item; None to compute them on the host, which a
    CUDA graph cannot capture.
    """
    # This includes ``with`` statements: an interrupt at the end of one could leave autograd off.
    defer_interrupts(_update_now, stages, executor, items, measured, scalars_of)


def _update_now(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    scalars_of: Callable[[Item], StepScalars] | None,
) -> None:
    with torch.no_grad():
        measured = complete(stages, executor, items, measured, scalars_of)
    entered = _enter(stages, executor, items, scalars_of, measured)
    entered.write(stages, executor, measured, counts=True)


def prepare(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    scalars_of: Callable[[Item], StepScalars] | None = None,
    *,
    counts: bool = True,
) -> Callable[[], None]:
    """Bind the step of :func:`update_`. All errors are raised now."""
    with torch.no_grad():
        measured = complete(stages, executor, items, measured, scalars_of)
    entered = defer_interrupts(_enter, stages, executor, items, scalars_of, measured)
    return partial(defer_interrupts, entered.write, stages, executor, measured, counts)


def require(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    scalars_of: Callable[[Item], StepScalars],
) -> None:
    """Raise RuntimeError or KernelError if an executor cannot step items like these."""
    defer_interrupts(_enter, stages, executor, items, scalars_of, ())


def totals(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    scalars_of: Callable[[Item], StepScalars] | None,
    measured: Sequence[Tensor],
) -> list[Tensor]:
    """Return the totals of all measured stages, for a caller that steps items in parts."""
    with torch.no_grad():
        found = complete(stages, executor, items, measured, scalars_of)
    seen = _enter(stages, executor, items, scalars_of, measured).seen
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
    """Items of an in-place step, converted to the tensors that an executor steps."""

    given: Sequence[Item]
    items: Sequence[Item]
    """For DTensors, the shards of this rank."""
    forms: list[Form]
    leaves: list[Leaf]
    seen: list[Leaf]
    """The leaves in the form that the executor steps."""
    results: list[Stepped] | None
    """Inside torch.func, the values to be written, computed early so that errors come early."""

    def _has_aliased_rows(self) -> bool:
        """Return True if sparse rows were copied from parameters that share memory.

        The rows of each parameter must then be copied after the earlier parameters were stepped.
        """
        if self.results is not None or ROWS not in self.forms or len(self.items) < 2:
            return False
        storages = [storage_key(item.param) for item in self.items]
        return len(set(storages)) < len(storages)

    def write(
        self, stages: Sequence[Stage], executor: Executor, measured: Sequence[Tensor], counts: bool
    ) -> None:
        """Step the items in place."""
        with torch.no_grad():
            if self._has_aliased_rows():
                sums = _all_totals(stages, executor, self.seen, measured)
                for form, leaf in zip(self.forms, self.leaves, strict=True):
                    seen = form.enter(leaf)
                    executor.update_(stages, [seen], sums)
                    form.write(leaf, seen)
            else:
                self._write_all(stages, executor, measured)
            for item in self.items if counts else ():
                item.state.step.add_(1)
            if self.given is not self.items:  # a DTensor and its shard have separate versions
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


def _enter(
    stages: Sequence[Stage],
    executor: Executor,
    given: Sequence[Item],
    scalars_of: Callable[[Item], StepScalars] | None,
    measured: Sequence[Tensor],
) -> _Entered:
    if scalars_of is None:
        check_not_captured(item.param for item in given)
        scalars_of = on_host(stages)
    with torch.no_grad():
        local = on_this_rank(stages, executor, given)
        items = _copy_aliased_gradients(local)
        given = items if local is given else given
    # With autograd on, so that tensor coefficients keep their derivatives.
    forms, leaves = leaves_of(stages, items, scalars_of)
    with torch.no_grad():
        seen = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
        executor.require(stages, seen)
        results = None
        if is_transforming():
            results = executor.update(stages, seen, measured)
            for one in zip(seen, results, strict=True):
                check_vmap_levels(*one)
    return _Entered(given, items, forms, leaves, seen, results)


def _copy_aliased_gradients(items: Sequence[Item]) -> Sequence[Item]:
    """Return items whose gradients are copied if a step of another item writes to them."""
    grads = [item.grad for item in items]
    written = [one for item in items for one in (item.param, *state_tensors(item.state.stages))]
    copies = clone_aliased(grads, written) if len(items) > 1 else grads
    if copies is grads:
        return items
    return [item._replace(grad=one) for item, one in zip(items, copies, strict=True)]
