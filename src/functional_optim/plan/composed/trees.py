"""Planned steps in place of trees whose leaves differ in their chains, or that keep shared numbers.

As in :mod:`functional_optim.plan.tree_plans`; what a step does is decided anew each time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.checks import check_grad
from functional_optim.core.overrides import paths_of
from functional_optim.core.state import State
from functional_optim.core.unbroken import unbroken
from functional_optim.kernels import EXECUTORS, in_place
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.plan.composed.addends import is_simple
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.leaf_inputs import of_tree
from functional_optim.plan.composed.step_leaves import StepLeaf, StepLeaves
from functional_optim.plan.composed.steps import ComposedSteps
from functional_optim.plan.flat_tree import FlatTree
from functional_optim.plan.known_trees import KnownTrees, TreeGuard, on_the_same_memory, writable
from functional_optim.plan.leaf_group import groups_of


class ComposedTree:
    """Plans for the steps of a tree.

    Args:
        optimizer: that steps it.
        tree: what was given.
        leaves: all of it that are no None.
    """

    def __init__(self, optimizer: Chain, tree: FlatTree, leaves: Sequence[StepLeaf]) -> None:
        paths = paths_of(tree.spec)
        params = [leaf.param for leaf in leaves]
        marks = [id(leaf.chain) for leaf in leaves]
        groups, numbers = groups_of(marks, [paths[k.position] for k in leaves], params)
        self._guard = TreeGuard(optimizer, tree, groups)
        with torch.no_grad():
            self._leaves = [
                leaf._replace(param=leaf.param.detach(), state=on_the_same_memory(leaf.state))
                for leaf in leaves
            ]
        stages = [link.stage for link in optimizer.links]
        executor = EXECUTORS[in_place(optimizer.executor, params, stages)]
        self._steps = ComposedSteps(executor, self._leaves, numbers)
        self._frozen = [k for k, leaf in enumerate(leaves) if not leaf.chain.stages]
        self._is_of_use = True

    def is_for(self, optimizer: Chain, tree: FlatTree) -> bool:
        """Return True if it is a step of these leaves, where they were, by the same stages."""
        return self._guard.holds(optimizer, tree)

    def make(
        self,
        optimizer: Chain,
        tree: FlatTree,
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
        gradients = tree.gradient_of_each()
        if gradients is None or not self._is_of_use:
            return False
        for k in self._frozen:
            if gradients[k] is not None:
                check_grad(self._leaves[k].param, gradients[k], self._leaves[k].name)
        given = of_tree(optimizer.links, tree.spec, self._leaves, extra)
        chains = self._guard.chain.chains
        try:
            step = self._steps.prepared(optimizer.links, chains, gradients, shared, measured, given)
        except NotPointwiseError:  # a rule that only says so is left to the reference
            self._is_of_use = False
            return False
        if step is None:
            return False
        unbroken(self._steps.make, step, shared)
        return True

    def learn(self, leaves: StepLeaves, decided: Decider) -> None:
        """Plan the steps after one that was made of these leaves."""
        if self._is_of_use:
            self._steps.learn(leaves, decided)


KNOWN: KnownTrees[ComposedTree] = KnownTrees()


def make(
    optimizer: Chain,
    given: tuple[Any, Any, State],
    measured: Sequence[Tensor],
    extra: Mapping[str, Any],
) -> bool:
    """The step in place of a tree, if it was planned.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients, and the state.
        measured: totals that are known.
        extra: the inputs beside the gradients.

    Returns:
        Whether it was made; otherwise nothing was changed.
    """
    tree = writable(optimizer, given) if KNOWN else None
    planned = None if tree is None else KNOWN.find(optimizer, tree)
    if tree is None or planned is None:
        return False
    return planned.make(optimizer, tree, given[2].shared, measured, extra)


def learn(
    optimizer: Chain, given: tuple[Any, Any, State], leaves: StepLeaves, decided: Decider
) -> None:
    """Plan the steps after this one, if the tree was stepped before.

    Args:
        optimizer: that made a step.
        given: parameters, gradients, and the state.
        leaves: of the step.
        decided: what it did.
    """
    tree = writable(optimizer, given)
    if tree is None or not KNOWN.is_known(tree) or not is_simple(tree.tensors):
        return
    planned = KNOWN.find(optimizer, tree)
    if planned is None:
        planned = ComposedTree(optimizer, tree, leaves.leaves)
        KNOWN.keep(tree, planned)
    planned.learn(leaves, decided)
