"""Planned steps in place of trees whose leaves differ in their chains, or that keep shared numbers.

What a step does is decided anew each time, for tensors that stay where they are. So a tree is known
by its first parameter, and planned when it is stepped for the second time. Its plans hold other
tensors on the same memory, and are dropped as soon as one of the given tensors goes.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.checks import check_grad
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.leaf import PLAIN
from functional_optim.core.overrides import paths_of
from functional_optim.core.state import GateCounts, LeafState, map_state
from functional_optim.kernels import EXECUTORS, in_place
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.plan.composed.addends import is_simple
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.leaf_inputs import of_tree
from functional_optim.plan.composed.step_leaves import StepLeaf, StepLeaves
from functional_optim.plan.composed.steps import ComposedSteps
from functional_optim.plan.guard import MemoryGuard
from functional_optim.plan.tree import Given, Tree, TreeChains, tree_of

PLANS = 8
"""Largest number of plans of one tree: for different optimizers and states."""

_IS_LEAF = attrgetter("is_leaf")
_GRADIENTS = PLAIN | {type(None)}


class ComposedTree:
    """Plans for the steps of a tree.

    Args:
        optimizer: that steps it.
        tree: what was given.
        leaves: all of it that are no None.
    """

    def __init__(self, optimizer: Chain, tree: Tree, leaves: Sequence[StepLeaf]) -> None:
        self._spec, self._form = tree.spec, tree.form
        paths = paths_of(self._spec)
        params = [leaf.param for leaf in leaves]
        marks = [id(leaf.chain) for leaf in leaves]
        self._chains = TreeChains(optimizer, marks, [paths[k.position] for k in leaves], params)
        self._now = self._chains.of(optimizer) or []
        self._guard = MemoryGuard(tree.tensors)
        with torch.no_grad():
            self._leaves = [
                leaf._replace(param=leaf.param.detach(), state=_on_the_same_memory(leaf.state))
                for leaf in leaves
            ]
        stages = [link.stage for link in optimizer.links]
        executor = EXECUTORS[in_place(optimizer.executor, params, stages)]
        self._steps = ComposedSteps(executor, self._leaves, self._chains.numbers)
        self._frozen = [k for k, leaf in enumerate(leaves) if not leaf.chain.stages]
        self._is_of_use = True

    def is_for(self, optimizer: Chain, tree: Tree) -> bool:
        """Return True if it is a step of these leaves, where they were, by the same stages."""
        if self._spec != tree.spec or self._form != tree.form:
            return False
        chains = self._chains.of(optimizer) if self._guard.hold(tree.tensors) else None
        self._now = self._now if chains is None else chains
        return chains is not None

    def make(
        self,
        optimizer: Chain,
        tree: Tree,
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
    ) -> bool:
        """The step; False, with nothing changed, where it was not planned.

        Args:
            optimizer: with the hyper-parameters of this step.
            tree: what is given.
            shared: what belongs to no leaf; it is written to.
            measured: totals that are known.
            extra: the inputs beside the gradients; those of leaves are trees.

        Raises:
            FloatingPointError, TypeError, ValueError, RuntimeError: as for any step; nothing was
                changed.
        """
        if not self._is_of_use:
            return False
        pairs = zip(tree.params, tree.grads, strict=True)
        gradients = [grad for param, grad in pairs if param is not None]
        for k in self._frozen:
            if gradients[k] is not None:
                check_grad(self._leaves[k].param, gradients[k], self._leaves[k].name)
        given = of_tree(optimizer.links, tree.spec, self._leaves, extra)
        try:
            step = self._steps.prepared(
                optimizer.links, self._now, gradients, shared, measured, given
            )
        except NotPointwiseError:  # a rule that only says so is left to the reference
            self._is_of_use = False
            return False
        if step is None:
            return False
        defer_interrupts(self._steps.make, step, shared)
        return True

    def learn(self, leaves: StepLeaves, decided: Decider) -> None:
        """Plan the steps after one that was made of these leaves."""
        if self._is_of_use:
            self._steps.learn(leaves, decided)


class _Known:
    """Plans of a tree, as long as all of its tensors live."""

    def __init__(self, first: Tensor) -> None:
        address = id(first)
        self.first = ref(first, lambda _: KNOWN.pop(address, None))
        self.plans: list[ComposedTree] = []
        self._watched: list[Any] = []

    def find(self, optimizer: Chain, tree: Tree) -> ComposedTree | None:
        """Return the plan of a step."""
        return next((one for one in self.plans if one.is_for(optimizer, tree)), None)

    def keep(self, planned: ComposedTree, tensors: Sequence[Tensor]) -> None:
        """Keep a plan until one of the tensors goes."""
        if len(self.plans) >= PLANS:
            self._forget()
        self.plans.append(planned)
        self._watched += [ref(one, self._forget) for one in tensors]

    def _forget(self, _: Any = None) -> None:
        self.plans.clear()
        self._watched.clear()


KNOWN: dict[int, _Known] = {}
"""Trees that were stepped before, by the identity of the first parameter."""


def make(
    optimizer: Chain,
    given: Given,
    measured: Sequence[Tensor],
    extra: Mapping[str, Any],
) -> bool:
    """Step a tree in place by its plan.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients, and the state.
        measured: totals that are known.
        extra: the inputs beside the gradients.

    Returns:
        False if the tree has no plan for the step; then nothing was changed.
    """
    tree = _listed(optimizer, given) if KNOWN else None
    known = None if tree is None else KNOWN.get(id(tree.tensors[0]))
    planned = None if tree is None or known is None else known.find(optimizer, tree)
    if tree is None or planned is None:
        return False
    return planned.make(optimizer, tree, given[2].shared, measured, extra)


def learn(optimizer: Chain, given: Given, leaves: StepLeaves, decided: Decider) -> None:
    """Plan the steps after this one, if the tree was stepped before.

    Args:
        optimizer: that made a step.
        given: parameters, gradients, and the state.
        leaves: of the step.
        decided: what it did.
    """
    tree = _listed(optimizer, given)
    if tree is None:
        return
    first = tree.tensors[0]
    known = KNOWN.get(id(first))
    if known is None or known.first() is not first:
        KNOWN[id(first)] = _Known(first)
    elif is_simple(tree.tensors):
        planned = known.find(optimizer, tree)
        if planned is None:
            planned = ComposedTree(optimizer, tree, leaves.leaves)
            known.keep(planned, tree.tensors)
        planned.learn(leaves, decided)


def _listed(optimizer: Chain, given: Given) -> Tree | None:
    """List parameters and state; None where no plan is for them, or autograd computed one."""
    tree = tree_of(optimizer, given, in_place=True, has_gradients=False)
    if tree is None or not all(map(_IS_LEAF, tree.tensors)):
        return None
    kinds = set(map(type, tree.grads))
    pairs = zip(tree.params, tree.grads, strict=True)
    has_stray = [None for param, grad in pairs if param is None and grad is not None]
    return None if has_stray or kinds == {type(None)} or not kinds <= _GRADIENTS else tree


def _on_the_same_memory(state: LeafState) -> LeafState:
    """Return a state in other tensors on its memory, so that the given ones are not kept."""
    stages = tuple(map_state(Tensor.detach, one) for one in state.stages)
    gates = tuple(GateCounts(one.runs.detach(), one.held.detach()) for one in state.gates)
    return LeafState(state.step.detach(), stages, gates)
