"""Trees of parameters, gradients and state, flattened and checked: what a step works on."""

from typing import TYPE_CHECKING, Any

import optree

from functional_optim.checks import check_grad, check_leaf_state, check_param, check_params
from functional_optim.engine import Item
from functional_optim.overrides import check_used, hypers_of, paths_of
from functional_optim.tree import Path, flatten, flatten_like, leaf_states, path_name

if TYPE_CHECKING:
    from functional_optim.optimizer import Optimizer


def params_of(
    optimizer: "Optimizer", params: Any
) -> tuple[list[Any], optree.PyTreeSpec, tuple[Path, ...]]:
    """Parameters that an optimizer is to begin with, flattened and checked: (leaves, spec, paths).

    Raises:
        TypeError, ValueError: parameters that :meth:`Optimizer.init` refuses, or an override that
            is meant for none of them.
    """
    leaves, spec = flatten(params, optimizer.namespace)
    paths = paths_of(spec)
    check_params(leaves, paths)
    check_used(optimizer.overrides, paths)
    return leaves, spec, paths


def items_of(
    optimizer: "Optimizer", params: Any, grads: Any, state: Any
) -> tuple[list[Any], optree.PyTreeSpec, list[Any], list[Item], list[int]]:
    """Everything flattened and checked: (leaves, spec, states, items, their positions)."""
    leaves, spec = flatten(params, optimizer.namespace)
    grad_leaves = flatten_like(spec, grads, "gradients")
    states = leaf_states(spec, state)
    hypers = hypers_of(optimizer.links, optimizer.overrides, spec)
    paths = paths_of(spec)
    items: list[Item] = []
    positions: list[int] = []
    for i, (param, grad) in enumerate(zip(leaves, grad_leaves, strict=True)):
        if grad is None:
            continue
        name = path_name(paths[i])
        if param is None:
            raise ValueError(f"there is a gradient at {name!r}, but the parameter is None")
        check_param(param, name)
        check_grad(param, grad, name)
        check_leaf_state(optimizer.stages, hypers[i], param, states[i], name)
        items.append(Item(param, grad, states[i], hypers[i], name))
        positions.append(i)
    return leaves, spec, states, items, positions
