"""One step over a list of leaves: coefficients, forms, executor, step counts.

Everything that steps anything (an Optimizer over a tree, a torch.optim front-end over groups, a
hook over a bucket) comes down to the two functions here. They take leaves that were checked.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import is_transforming
from functional_optim.core.aliasing import GivenMemory, laid_as
from functional_optim.core.capturing import check_not_captured
from functional_optim.core.checks import sparse_form
from functional_optim.core.compiling import uncompiled
from functional_optim.core.dtensors import is_sharded, local, placed_as
from functional_optim.core.forms import (
    DENSE,
    Form,
    form_as_gradient,
    form_of,
    is_laid_apart,
    map_state,
)
from functional_optim.core.leaf import (
    Leaf,
    Stepped,
    is_measured,
    require_kept,
    require_room,
)
from functional_optim.core.local_shards import (
    check_same_places,
    check_steps_shards,
    like,
    local_states,
)
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.core.unbroken import unbroken
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.reference import ReferenceExecutor, write
from functional_optim.plan.item import Item, Made, on_host


def _leaves(
    stages: Sequence[Stage], items: Sequence[Item], make: Callable[[Item], Made]
) -> tuple[list[Form], list[Leaf]]:
    """Items as executors take them."""
    forms: list[Form] = []
    leaves: list[Leaf] = []
    fields = tuple([stage.as_gradient for stage in stages])
    follows = any(fields)
    for item in items:
        hypers, coefficients, step, scalars = make(item)
        dense = item.grad.layout == torch.strided
        form = form_of(
            item.param,
            "no" if dense else sparse_form(stages, item.hypers, item.grad, item.name),
        )
        if follows and form is DENSE and is_laid_apart(item.param, item.grad):
            form = form_as_gradient(fields)
        forms.append(form)
        state = item.state.stages
        leaves.append(
            Leaf(item.param, item.grad, state, coefficients, item.name, hypers, step, None, scalars)
        )
    return forms, leaves


def _given(items: Sequence[Item], measured: Sequence[Tensor]) -> GivenMemory:
    """All tensors that a step was handed."""
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
    """New params and states; the items stay as they are, and share no memory with them.

    Arguments as for :func:`update_`.
    """
    check_not_captured(item.param for item in items)
    before, items = items, _on_this_rank(stages, executor, items)
    forms, leaves = _leaves(stages, items, on_host(stages) if make is None else make)
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    given = _given(items, measured)

    def result(old: Tensor, new: Tensor) -> Tensor:
        return given.apart(laid_as(placed_as(new, old), old))

    results = []
    stepped = unbroken(executor.update, stages, entered, measured)
    for item, form, leaf, seen, one in zip(items, forms, leaves, entered, stepped, strict=True):
        require_kept(seen, one)
        param, states = form.leave(leaf, one)
        pairs = zip(item.state.stages, states, strict=True)
        states = tuple(map_state(result, old, new) for old, new in pairs)
        results.append((result(item.param, param), LeafState(item.state.step + 1, states)))
    return [_whole(item, *made) for item, made in zip(before, results, strict=True)]


def _whole(item: Item, param: Tensor, state: LeafState) -> tuple[Tensor, LeafState]:
    """What became of an item, in DTensors where it has them."""
    if not is_sharded(item.param) or is_sharded(param):
        return param, state
    states = tuple(map(like, item.state.stages, state.stages))
    return like(item.param, param), state._replace(stages=states)


def _on_this_rank(
    stages: Sequence[Stage], executor: Executor, items: Sequence[Item]
) -> Sequence[Item]:
    """Items of which DTensors are the shards that lie here, for executors that look into memory.

    An executor that takes DTensors is given all but complex ones: what is written to the real view
    of one whose shards are of different sizes is lost.
    """
    if not any(is_sharded(item.param) for item in items):
        return items
    whole = executor.takes_dtensors
    return [
        _local(stages, item)
        if is_sharded(item.param) and (item.param.is_complex() or not whole)
        else item
        for item in items
    ]


def _local(stages: Sequence[Stage], item: Item) -> Item:
    param, name = item.param, item.name
    assert is_sharded(param)
    check_steps_shards(stages, name)
    check_same_places(param, item.grad, f"gradient at {name!r}")
    states = local_states(param, item.state.stages, name)
    state = item.state._replace(stages=states)
    return item._replace(param=local(param), grad=local(item.grad), state=state)


@uncompiled
def update_(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
    make: Callable[[Item], Made] | None = None,
) -> None:
    """The same, written into the items' params and states, unbroken by interrupts.

    Args:
        stages: of the chain.
        executor: that steps them.
        items: to be stepped.
        measured: totals that are known.
        make: gives the coefficients of each; None for numbers, which are no part of a CUDA graph.

    Raises:
        RuntimeError, KernelError: as of :func:`prepared`; nothing was changed.
    """
    # All of it: where an interrupt meets the end of a with statement, what was switched off there
    # stays off.
    unbroken(_updated, stages, executor, items, measured, make)


def _updated(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made] | None,
) -> None:
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
    """What makes the step of :func:`update_` when it is called; all errors are raised now.

    Args:
        stages, executor, items, measured, make: as for :func:`update_`.
        counts: whether it is a step of each, to be counted.

    Raises:
        RuntimeError: a sparse gradient that the stages cannot take; a CUDA graph is being captured.
        KernelError: the executor does not take one of them.
    """
    entered = unbroken(_entered, stages, executor, items, make, measured)
    return partial(unbroken, entered.write, stages, executor, measured, counts)


def totals(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    make: Callable[[Item], Made] | None,
    measured: Sequence[Tensor],
) -> list[Tensor]:
    """The sums of all measured stages that such a step takes, for who steps its items in parts.

    Args:
        stages, executor, items, make: as for :func:`prepared`, and so are the errors.
        measured: those that are known.
    """
    seen, found = _entered(stages, executor, items, make, measured).seen, list(measured)
    with torch.no_grad():
        for _ in range(sum(map(is_measured, stages)) - len(found)):
            found.append(executor.measure(stages, seen, found))
    return found


class _Entered(NamedTuple):
    """Items that a step in place is ready for."""

    given: Sequence[Item]
    items: Sequence[Item]
    """Of DTensors, the shards that lie here."""
    forms: list[Form]
    leaves: list[Leaf]
    seen: list[Leaf]
    """The same, as an executor sees them."""
    results: list[Stepped] | None
    """Inside of torch.func, what is to be written, where nothing else refuses it in time."""

    def write(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        measured: Sequence[Tensor],
        counts: bool,
    ) -> None:
        """Step them, in place."""
        with torch.no_grad():
            if self.results is None:
                executor.update_(stages, self.seen, measured)
            else:
                for one in zip(self.seen, self.results, strict=True):
                    write(*one)
            for item, form, leaf, seen in zip(*self[1:5], strict=True):
                form.write(leaf, seen)
                if counts:
                    item.state.step.add_(1)
            if self.given is not self.items:  # autograd counts DTensors apart from their shards
                torch.autograd.graph.increment_version([one.param for one in self.given])


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
        items = _on_this_rank(stages, executor, given)
    forms, leaves = _leaves(stages, items, make)  # numbers keep the derivatives that they carry
    with torch.no_grad():
        seen = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
        executor.require(stages, seen)
        results = None
        if is_transforming():
            results = executor.update(stages, seen, measured)
            for one in zip(seen, results, strict=True):
                require_room(*one)
    return _Entered(given, items, forms, leaves, seen, results)


def measure(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor] = (),
) -> Tensor:
    """The sum over these items that the first stage not yet in ``measured`` needs."""
    check_not_captured(item.param for item in items)
    items = _on_this_rank(stages, executor, items)
    forms, leaves = _leaves(stages, items, on_host(stages))
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    return executor.measure(stages, entered, measured)


def reduced(
    stages: Sequence[Stage],
    executor: Executor,
    items: Sequence[Item],
    measured: Sequence[Tensor],
    make: Callable[[Item], Made],
) -> Tensor:
    """What these items add to the total, or totals, of the last of some stages.

    Args:
        stages: up to the one that needs a total.
        executor: takes the sum of a measured stage.
        items: that reach it.
        measured: the totals of the measured stages before it.
        make: gives the coefficients of each.

    Returns:
        A 0-d float64 tensor; a vector of a stage that reduces.
    """
    check_not_captured(item.param for item in items)
    items = _on_this_rank(stages, executor, items)
    forms, leaves = _leaves(stages, items, make)
    entered = [form.enter(leaf) for form, leaf in zip(forms, leaves, strict=True)]
    if stages[-1].reduce is None:
        return executor.measure(stages, entered, measured)
    return ReferenceExecutor().reduce(stages, entered, measured)
