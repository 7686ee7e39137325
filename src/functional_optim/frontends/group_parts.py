"""Division of parameter groups into groups with one chain each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.hyper import hash_key
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.overrides import LeafChain, chains_at
from functional_optim.core.stage import Stage
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.torch_groups import (
    FROZEN_OPTIONS,
    copy_option_tensors,
    require_options,
)
from functional_optim.optimizer import Optimizer

CheckParam = Callable[[Sequence[Stage], Tensor, str], None]
"""Function of stages, parameter and name that raises ValueError for an unsupported parameter."""


class GroupPart(NamedTuple):
    """Parameter group with one chain."""

    group: dict[str, Any]
    """The group, as torch's class takes it."""
    optimizer: Optimizer
    """Optimizer of this chain only, with the names of hyper-parameters in the group."""
    places: tuple[int, ...]
    """The indices of its stages among all links."""


def needs_groups(optimizer: Optimizer) -> bool:
    """Return True if parameters may need several groups, or if there are shared scalars."""
    return optimizer.is_composed or bool(optimizer.overrides)


def divide_group(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    first: int,
    selectors: UnmatchedSelectors,
    check: CheckParam = check_takes_dtensor,
) -> list[GroupPart]:
    """Divide a parameter group into groups with one chain each, ordered by first parameter.

    Its "params" are parameters, or pairs of a name and a parameter. A parameter without a name has
    its number as its path; ``first`` is the number of parameters in the earlier groups.
    """
    every = enumerate(group["params"], first)
    pairs = [one if isinstance(one, tuple) else (place, one) for place, one in every]
    paths, params = [(name,) for name, _ in pairs], [param for _, param in pairs]
    for path, param in zip(paths, params, strict=True):
        selectors.add_leaf(path, param)
    chains = chains_at(optimizer.links, optimizer.overrides, paths, params)
    distinct = {id(chain): chain for chain in chains}
    keys = {k: (one.places, hash_key(one.hypers)) for k, one in distinct.items()}
    found: dict[Any, tuple[LeafChain, list[Any]]] = {}
    for one, (name, param), chain in zip(group["params"], pairs, chains, strict=True):
        check(chain.stages, param, str(name))
        found.setdefault(keys[id(chain)], (chain, []))[1].append(one)
    parts = [_part(optimizer, group, chain, own) for chain, own in found.values()]
    names = {name for part in parts for name in part.optimizer.hyper}
    names.update(*(FROZEN_OPTIONS for part in parts if not part.places))
    # Options of links that act on other parameters are allowed too: groups often share options.
    require_options(group, names.union(*(link.hyper._fields for link in optimizer.links)))
    return parts


def _part(
    optimizer: Optimizer, group: Mapping[str, Any], chain: LeafChain, params: list[Any]
) -> GroupPart:
    own = optimizer.of_chain(chain)
    options = own.hyper if own.links else FROZEN_OPTIONS
    made = {**options, **group, "params": params}
    copy_option_tensors(made)
    return GroupPart(made, own, chain.places)
