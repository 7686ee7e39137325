"""Trees of a step: flattened, and compared with others by plain values."""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple

import optree
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.hyper import all_plain
from functional_optim.core.initial import StateFields
from functional_optim.core.leaf import PLAIN, Leaf
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import State
from functional_optim.core.tree import Path, flatten
from functional_optim.native import LOOPS
from functional_optim.plan.python_loops import PYTHON_LOOPS

Given = tuple[Any, Any, State]
"""Parameters, gradients and state of a step."""

_LEAVES = PLAIN | {type(None)}

_SPECS: dict[Any, optree.PyTreeSpec] = {}
"""Structure of the last tree of a class and length, which is tried first: comparing is faster than
flattening a dict, whose keys are sorted."""

_KINDS = 64
"""Largest number of structures that are kept."""


class Tree(NamedTuple):
    """Arguments of a step, each as a list with an entry for each leaf, and all of their tensors."""

    spec: optree.PyTreeSpec
    params: list[Any]
    grads: list[Any]
    states: list[Any]
    tensors: list[Tensor]
    """All parameters, then the state leaf by leaf, then gradients or shared state."""
    form: list[Any]
    """Everything but the tensors: classes, lengths, and what is None."""

    def has(self, params: Sequence[Tensor], positions: Sequence[int]) -> bool:
        """Return True if these are the parameters at positions.

        Leaves of an OrderedDict are in the order of its keys, and here perhaps in the order of
        another one.
        """
        return all(map(is_, map(self.params.__getitem__, positions), params))

    def leaf(self, position: int, coefficients: tuple[Any, ...]) -> Leaf:
        """Return a leaf as stages see it."""
        states = self.states[position].stages
        return Leaf(self.params[position], self.grads[position], states, coefficients, "")


def tree_of(
    optimizer: Chain, given: Given, *, in_place: bool, has_gradients: bool = True
) -> Tree | None:
    """List the arguments of a step; None if they do not fit, or hold anything but plain tensors.

    Args:
        optimizer: that steps them.
        given: parameters, gradients and state.
        in_place: True if no tree is built from the structure: a dict and an OrderedDict with the
            same keys are then the same structure.
        has_gradients: False to list the tensors of the shared state in place of the gradients.
    """
    params, grads, state = given
    if not isinstance(state, State):
        return None
    leaves, spec = (_flatten_again if in_place else flatten)(params, optimizer.namespace)
    try:
        every, states = spec.flatten_up_to(grads), spec.flatten_up_to(state.leaves)
    except (TypeError, ValueError):  # the checks of a step without a plan name the difference
        return None
    found = (LOOPS.loaded or PYTHON_LOOPS).walk(
        [leaves, states, every if has_gradients else state.shared]
    )
    return None if found is None else Tree(spec, leaves, every, states, *found)


def _flatten_again(params: Any, namespace: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Flatten parameters, perhaps by the structure of an earlier tree."""
    if isinstance(params, OrderedDict):
        return flatten(params, namespace)  # another one may have the same keys in another order
    size = len(params) if isinstance(params, (dict, list, tuple)) else 0
    key = namespace, type(params), size
    if key in _SPECS:
        with suppress(ValueError):
            leaves: list[Any] = _SPECS[key].flatten_up_to(params)
            if _LEAVES.issuperset(map(type, leaves)):
                return leaves, _SPECS[key]
    if len(_SPECS) >= _KINDS:
        _SPECS.clear()
    leaves, _SPECS[key] = flatten(params, namespace)
    return leaves, _SPECS[key]


class TreeChains:
    """Chains of the leaves of a tree, by any optimizer with the same stages and selectors.

    Hyper-parameters may differ, as long as they need the state that is there.

    Args:
        optimizer: that stepped the tree.
        marks: for each leaf a value that the leaves of a chain share.
        paths: of the leaves.
        params: of the leaves.
    """

    def __init__(
        self, optimizer: Chain, marks: Sequence[Any], paths: Sequence[Path], params: Sequence[Any]
    ) -> None:
        members: dict[Any, list[int]] = {}
        for k, mark in enumerate(marks):
            members.setdefault(mark, []).append(k)
        order = {mark: number for number, mark in enumerate(members)}
        self.numbers = [order[mark] for mark in marks]
        """For each leaf, the number of its chain."""
        self._firsts = [(paths[k], tuple(params[k].shape)) for k, *_ in members.values()]
        self._key, chains = _key_of(optimizer), self._chains_by(optimizer)
        self._last: tuple[Any, Any, list[LeafChain]] = (), (), []
        self._fields = [
            StateFields(
                chain.stages,
                chain.hypers,
                {(tuple(params[k].shape), params[k].dtype) for k in members[mark]},
            )
            for mark, chain in zip(order, chains, strict=True)
        ]

    def of(self, optimizer: Chain) -> list[LeafChain] | None:
        """Return the chains by their numbers; None if the optimizer steps the leaves otherwise."""
        links, overrides, chains = self._last
        is_last = optimizer.links is links and optimizer.overrides is overrides
        if is_last and optimizer.executor == self._key[0]:
            return chains
        if _key_of(optimizer) != self._key:
            return None
        chains = self._chains_by(optimizer)
        for fields, chain in zip(self._fields, chains, strict=True):
            if not fields.hold(chain.hypers):
                return None
        if all_plain(
            [chain.hypers for chain in chains]
        ):  # a tensor or a schedule is not kept alive
            self._last = optimizer.links, optimizer.overrides, chains
        return chains

    def _chains_by(self, optimizer: Chain) -> list[LeafChain]:
        if optimizer.overrides or optimizer.is_composed:
            return [optimizer.chain_at(*first) for first in self._firsts]
        links = optimizer.links
        hypers = tuple([link.hyper for link in links])
        return [LeafChain(tuple(range(len(links))), optimizer.stages, hypers)]


def _key_of(optimizer: Chain) -> tuple[Any, ...]:
    """Return what an optimizer is but for its numbers."""
    links = [(link.stage, link.where) for link in optimizer.links]
    return optimizer.executor, links, [where for where, _ in optimizer.overrides]
