"""Flattening and checks of trees of parameters and state."""

from collections.abc import Sequence
from typing import Any

import optree

from functional_optim.core.chain import Chain
from functional_optim.core.checks import (
    check_params,
    check_writable,
    check_writable_state,
)
from functional_optim.core.initial import init_leaf
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.overrides import chains_of, paths_of
from functional_optim.core.state import State
from functional_optim.core.tree import Path, flatten, path_name
from functional_optim.core.unmatched_selectors import check_used
from functional_optim.plan.shared_numbers import initial_shared


def params_of(
    optimizer: Chain, params: Any
) -> tuple[list[Any], optree.PyTreeSpec, tuple[Path, ...]]:
    """Flatten and check the parameters for ``init`` or ``bind``: (leaves, spec, paths).

    Raises:
        TypeError, ValueError: parameters that :meth:`Optimizer.init` refuses, or an override that
            matches no parameter.
    """
    leaves, spec = flatten(params, optimizer.namespace)
    paths = paths_of(spec)
    check_params(leaves, paths)
    check_used(optimizer.links, optimizer.overrides, paths, leaves)
    return leaves, spec, paths


def initial_state(optimizer: Chain, params: Any) -> State:
    """Implement :meth:`Optimizer.init`."""
    leaves, spec, paths = params_of(optimizer, params)
    chains = chains_of(optimizer.links, optimizer.overrides, spec, leaves)
    for leaf, chain, path in zip(leaves, chains, paths, strict=True):
        if leaf is not None:
            check_takes_dtensor(chain.stages, leaf, path_name(path))
    states = [
        None if leaf is None else init_leaf(chain.stages, chain.hypers, leaf)
        for leaf, chain in zip(leaves, chains, strict=True)
    ]
    return State(spec.unflatten(states), initial_shared(optimizer.links, chains))


def check_in_place(leaves: Sequence[Any], spec: optree.PyTreeSpec, items: Sequence[Any]) -> None:
    """Make sure that items can be stepped in place, each once.

    Args:
        leaves: all parameters of the tree.
        spec: of the tree.
        items: the items or leaves to be stepped: with name, param and state.

    Raises:
        TypeError, ValueError: names the leaf, and what is wrong with it.
    """
    check_params(leaves, paths_of(spec))
    check_writable({item.name: item.param for item in items})
    check_writable_state({item.name: item.state for item in items})
