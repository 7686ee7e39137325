"""Trees of a step: flattened, and compared with others by plain values."""

from collections.abc import Sequence
from contextlib import suppress
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

_LEAVES = PLAIN | {type(None)}

_SPECS: dict[Any, optree.PyTreeSpec] = {}
"""Structure of the last tree of a class and length, which is tried first: comparing is faster than
flattening a dict, whose keys are sorted."""

_KINDS = 64
"""Largest number of structures that are kept."""


class Tree(NamedTuple):
    """Arguments of a step, each as a list with an entry for each leaf."""

    spec: optree.PyTreeSpec
    params: list[Any]
    grads: list[Any]
    states: list[Any]

    def leaf(self, position: int, coefficients: tuple[Any, ...]) -> Leaf:
        """Return a leaf as stages see it."""
        param, grad, state = (one[position] for one in self[1:])
        return Leaf(param, grad, state.stages, coefficients, "")


def tree_of(
    namespace: str, params: Any, grads: Any, state: Any, *, in_place: bool = False
) -> Tree | None:
    """Flatten the arguments of a step; return None if a tree does not fit the parameters.

    Args:
        namespace: of optree.
        params: a tree of parameters.
        grads: the same tree with gradients.
        state: of an optimizer.
        in_place: True if no tree is built from the structure: a dict and an OrderedDict with the
            same keys are then the same structure.
    """
    if not isinstance(state, State):
        return None
    leaves, spec = (_flatten_again if in_place else flatten)(params, namespace)
    try:
        return Tree(spec, leaves, spec.flatten_up_to(grads), spec.flatten_up_to(state.leaves))
    except (TypeError, ValueError):  # the checks of a step without a plan name the difference
        return None


def _flatten_again(params: Any, namespace: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Flatten parameters, perhaps by the structure of an earlier tree."""
    size = len(params) if isinstance(params, (dict, list, tuple)) else 0
    key = namespace, type(params), size
    known = _SPECS.get(key)
    if known is not None:
        with suppress(ValueError):
            leaves: list[Any] = known.flatten_up_to(params)
            if _LEAVES.issuperset(map(type, leaves)):
                return leaves, known
    if len(_SPECS) >= _KINDS:
        _SPECS.clear()
    leaves, _SPECS[key] = flatten(params, namespace)
    return leaves, _SPECS[key]


def walk(tree: Any) -> tuple[list[Tensor], list[Any]] | None:
    """Return the tensors of a tree and its form, as the native ``walk`` does."""
    tensors: list[Tensor] = []
    form: list[Any] = []
    left = [tree]
    while left:
        one = left.pop()
        if type(one) in PLAIN:
            tensors.append(one)
            form.append(True)
        elif isinstance(one, tuple) or type(one) is list:
            form += [len(one), type(one)]
            left += reversed(one)
        elif one is None:
            form.append(None)
        else:
            return None
    return tensors, form


class Chains:
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
