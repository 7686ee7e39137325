"""Trees of parameters and state: checked, flattened into lists, and compared by structure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim._torch.compilers import has_dispatch_mode
from functional_optim._torch.derivatives import is_forward_mode, is_transforming
from functional_optim.core.chain import Chain
from functional_optim.core.checks import check_params, check_writable, check_writable_state
from functional_optim.core.hyper import is_all_plain
from functional_optim.core.leaf import PLAIN
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.overrides import LeafChain, chains_of, paths_of
from functional_optim.core.state import State
from functional_optim.core.state_init import StateFields, init_leaf
from functional_optim.core.tree import Path, flatten, path_name
from functional_optim.core.unmatched_selectors import check_used
from functional_optim.native import LOOPS
from functional_optim.plan.python_loops import PYTHON_LOOPS
from functional_optim.plan.shared_numbers import initial_shared

Given = tuple[Any, Any, State]
"""Parameters, gradients and state of a step."""

_LEAVES = PLAIN | {type(None)}

_REQUIRES_GRAD = attrgetter("requires_grad")

_SPECS: dict[Any, optree.PyTreeSpec] = {}
"""The last structure of a tree, by class and length. It is tried first, because comparing is faster
than flattening a dict, whose keys are sorted."""

_KINDS = 64
"""Largest number of structures that are kept."""


class Tree(NamedTuple):
    """Arguments of a step as lists with an entry for each leaf, and all of their tensors."""

    spec: optree.PyTreeSpec
    params: list[Any]
    grads: list[Any]
    states: list[Any]
    tensors: list[Tensor]
    """All parameters, then the state leaf by leaf, then the shared state."""
    form: list[Any]
    """Everything except the tensors: classes, lengths, and None entries."""

    def has(self, params: Sequence[Tensor], positions: Sequence[int]) -> bool:
        """Return True if these are the parameters at these positions.

        They may differ for an OrderedDict: two of them with the same keys may differ in order.
        """
        return all(map(is_, map(self.params.__getitem__, positions), params))


def tree_of(optimizer: Chain, given: Given, *, in_place: bool) -> Tree | None:
    """List the arguments of a step; None if structures differ, or if a tensor is not plain.

    A step in place builds no new tree. A dict and an OrderedDict with the same keys then count as
    the same structure.
    """
    params, grads, state = given
    if not isinstance(state, State):
        return None
    leaves, spec = (_flatten_again if in_place else flatten)(params, optimizer.namespace)
    try:
        every, states = spec.flatten_up_to(grads), spec.flatten_up_to(state.leaves)
    except (TypeError, ValueError):  # the checks of a step without a plan name the difference
        return None
    found = (LOOPS.loaded or PYTHON_LOOPS).walk([leaves, states, state.shared])
    return None if found is None else Tree(spec, leaves, every, states, *found)


def _flatten_again(params: Any, namespace: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Flatten parameters, with a cached structure if it fits."""
    if isinstance(params, OrderedDict):
        return flatten(params, namespace)  # two with the same keys may differ in their order
    size = len(params) if isinstance(params, (dict, list, tuple)) else 0
    key = namespace, type(params), size
    spec = _SPECS.get(key)
    if spec is not None:
        with suppress(ValueError):
            leaves: list[Any] = spec.flatten_up_to(params)
            if _LEAVES.issuperset(map(type, leaves)):
                return leaves, spec
    if len(_SPECS) >= _KINDS:
        _SPECS.clear()
    leaves, spec = flatten(params, namespace)
    _SPECS[key] = spec  # another thread may clear the cache
    return leaves, spec


def planned_tree_of(optimizer: Chain, given: Given, *, in_place: bool) -> Tree | None:
    """Return :func:`tree_of` the arguments of a step; None if no plan may step them."""
    if is_transforming():
        return None
    if in_place:
        return tree_of(optimizer, given, in_place=True)
    if has_dispatch_mode() or is_forward_mode() or torch.is_inference_mode_enabled():
        return None
    tree = tree_of(optimizer, given, in_place=False)
    if tree is None or not torch.is_grad_enabled():
        return tree
    grads = [one for one in tree.grads if isinstance(one, Tensor)]
    return None if any(map(_REQUIRES_GRAD, (*tree.tensors, *grads))) else tree


class TreeChains:
    """Chains of the leaves of a tree, for any optimizer with the same stages and selectors.

    Hyper-parameters may differ, if the state has the same fields.

    Args:
        optimizer: that stepped the tree.
        marks: for each leaf, a value that is equal for leaves of the same chain.
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
        """Return the chains by number; None if stages, selectors or executor differ."""
        links, overrides, chains = self._last
        is_last = optimizer.links is links and optimizer.overrides is overrides
        if is_last and optimizer.executor == self._key[0]:
            return chains
        if _key_of(optimizer) != self._key:
            return None
        chains = self._chains_by(optimizer)
        for fields, chain in zip(self._fields, chains, strict=True):
            if not fields.is_valid_for(chain.hypers):
                return None
        # Tensors and schedules must not be kept alive.
        if is_all_plain([chain.hypers for chain in chains]):
            self._last = optimizer.links, optimizer.overrides, chains
        return chains

    def _chains_by(self, optimizer: Chain) -> list[LeafChain]:
        if optimizer.overrides or optimizer.is_composed:
            return [optimizer.chain_at(*first) for first in self._firsts]
        links = optimizer.links
        hypers = tuple([link.hyper for link in links])
        return [LeafChain(tuple(range(len(links))), optimizer.stages, hypers)]


class TreeForm:
    """Form of a tree (everything except the tensors), and the chains of its leaves."""

    def __init__(
        self, optimizer: Chain, tree: Tree, marks: Sequence[Any], positions: Sequence[int]
    ) -> None:
        paths, states = paths_of(tree.spec), tree.states
        self._spec, self._form = tree.spec, tree.form
        params = [tree.params[k] for k in positions]
        self._chains = TreeChains(optimizer, marks, [paths[k] for k in positions], params)
        structure = optree.tree_structure(states)  # type: ignore[arg-type]
        start = sum(one is not None for one in tree.params)
        self._states = structure, start, start + structure.num_leaves
        self._missing = [k for k, one in enumerate(tree.params) if one is None]

    @property
    def numbers(self) -> list[int]:
        """For each leaf, the number of its chain."""
        return self._chains.numbers

    @property
    def end(self) -> int:
        """The number of tensors of parameters and leaf states."""
        return self._states[2]

    def chains(self, optimizer: Chain, tree: Tree) -> list[LeafChain] | None:
        """Return the chains by number; None if the tree has another form."""
        if self._form != tree.form or (self._spec is not tree.spec and self._spec != tree.spec):
            return None
        return self._chains.of(optimizer)

    def after(self, tree: Tree, tensors: Sequence[Tensor], kept: Iterable[int]) -> tuple[Any, Any]:
        """Return parameters and leaf states after a pure step.

        ``kept`` has the positions of the leaves that did not change. Their states, and those of
        missing parameters, stay the same objects.
        """
        structure, start, end = self._states
        left = iter(tensors)
        params = [None if one is None else next(left) for one in tree.params]
        states: Any = structure.unflatten(tensors[start:end])
        for k in (*kept, *self._missing):
            states[k] = tree.states[k]
        return tree.spec.unflatten(params), tree.spec.unflatten(states)


def _key_of(optimizer: Chain) -> tuple[Any, ...]:
    """Return the executor, stages and selectors of an optimizer, without hyper-parameters."""
    links = [(link.stage, link.where) for link in optimizer.links]
    return optimizer.executor, links, [where for where, _ in optimizer.overrides]


def params_of(
    optimizer: Chain, params: Any
) -> tuple[list[Any], optree.PyTreeSpec, tuple[Path, ...]]:
    """Flatten and check the parameters for ``init`` or ``bind``: (leaves, spec, paths)."""
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
    return State(spec.unflatten(states), initial_shared(optimizer, chains))


def check_in_place(leaves: Sequence[Any], spec: optree.PyTreeSpec, items: Sequence[Any]) -> None:
    """Raise TypeError or ValueError if a leaf cannot be stepped in place, or occurs twice."""
    check_params(leaves, paths_of(spec))
    check_writable({item.name: item.param for item in items})
    check_writable_state({item.name: item.state for item in items})
