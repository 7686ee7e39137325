"""Leaves for executors: their forms, and the local shards of DTensors."""

from collections.abc import Callable, Sequence

import torch

from functional_optim.core.checks import check_takes_dense, sparse_form
from functional_optim.core.dtensors import is_dtensor, to_local
from functional_optim.core.leaf import Leaf
from functional_optim.core.local_shards import (
    can_step_shards,
    check_placements,
    check_takes_dtensor,
    local_gradient,
    local_states,
    refuse_executor,
)
from functional_optim.core.stage import Stage
from functional_optim.core.stage_defaults import takes_dense
from functional_optim.core.views import DENSE, Form, form_as_gradient, form_of, has_other_strides
from functional_optim.kernels.executor import Executor
from functional_optim.plan.item import Item, StepScalars


def leaves_of(
    stages: Sequence[Stage], items: Sequence[Item], scalars_of: Callable[[Item], StepScalars]
) -> tuple[list[Form], list[Leaf]]:
    """Return the forms of items, and their leaves for an executor."""
    forms: list[Form] = []
    leaves: list[Leaf] = []
    fields = tuple([stage.as_gradient for stage in stages])
    follows = any(fields)
    wants_sparse = any(stage.dense is not takes_dense for stage in stages)
    for item in items:
        hypers, coefficients, step, scalars = scalars_of(item)
        dense = item.grad.layout == torch.strided
        if dense and wants_sparse:
            check_takes_dense(stages, item.hypers, item.name)
        form = form_of(
            item.param, "no" if dense else sparse_form(stages, item.hypers, item.grad, item.name)
        )
        if follows and form is DENSE and has_other_strides(item.param, item.grad):
            form = form_as_gradient(fields)
        forms.append(form)
        state = item.state.stages
        leaves.append(
            Leaf(item.param, item.grad, state, coefficients, item.name, hypers, step, None, scalars)
        )
    return forms, leaves


def on_this_rank(
    stages: Sequence[Stage], executor: Executor, items: Sequence[Item]
) -> Sequence[Item]:
    """Return items with the shards of this rank instead of DTensors, if the chain can step shards.

    Other chains get DTensors unchanged, if the executor takes them. Complex DTensors are refused,
    because writes to the real view of uneven shards are lost.
    """
    if not any(is_dtensor(item.param) for item in items):
        return items
    if can_step_shards(stages):
        return [shard_of(item) if is_dtensor(item.param) else item for item in items]
    for item in items:
        if is_dtensor(item.param):
            check_takes_dtensor(stages, item.param, item.name)
            if item.param.is_complex() or not executor.takes_dtensors:
                refuse_executor(stages, item.param, item.name)
    return items


def shard_of(item: Item) -> Item:
    """Return the item of this rank's shard of a DTensor."""
    param, name = item.param, item.name
    assert is_dtensor(param)
    check_placements(param, f"parameter at {name!r}")
    grad = local_gradient(param, item.grad, name)
    states = local_states(param, item.state.stages, name)
    return item._replace(param=to_local(param), grad=grad, state=item.state._replace(stages=states))
