"""Plans of the tree doors ``update_`` and ``update``: a StepPlan and what is of trees.

Each step lists the tensors of its trees and hands them to the :class:`StepPlan` of trees with the
same form. ``update`` runs the same plan on copies. What no plan steps goes through
:mod:`functional_optim.plan.engine`.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim._torch import (
    foreach_clone,
    has_dispatch_mode,
    is_forward_mode,
    is_transforming,
)
from functional_optim.core.chain import Chain
from functional_optim.core.hyper import all_plain
from functional_optim.core.overrides import paths_of
from functional_optim.core.state import State
from functional_optim.kernels import Executor, executor_for
from functional_optim.plan.item import Item, next_step
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.step_counts import is_count
from functional_optim.plan.step_plan import StepPlan
from functional_optim.plan.tree import Given, Tree, TreeChains, tree_of

Hypers = list[tuple[Any, ...]]
"""The hyper-parameters of each chain of a tree."""

PLANS = 16
"""Largest number of plans that are kept, for all trees."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class TreePlan:
    """A step of all trees with a certain form.

    Args:
        optimizer: that made such a step.
        executor: that binds kernels.
        tree: that was stepped.
        items: the leaves that were stepped: all with a gradient.
        positions: of the items in the tree.
        rows: for each item, the positions of its tensors among those of the tree.
    """

    def __init__(
        self,
        optimizer: Chain,
        executor: Executor,
        tree: Tree,
        items: Sequence[Item],
        positions: Sequence[int],
        rows: Sequence[LeafPositions],
    ) -> None:
        paths, params = paths_of(tree.spec), [item.param for item in items]
        marks = [id(item.hypers) for item in items]
        self._spec, self._form = tree.spec, tree.form
        self._chains = TreeChains(optimizer, marks, [paths[k] for k in positions], params)
        states: Any = tree.states
        structure = optree.tree_structure(states)
        start = sum(one is not None for one in tree.params)
        end = len(tree.tensors) - len(items)  # gradients are last
        self._states = structure, start, end
        self._missing = [k for k, one in enumerate(tree.grads) if one is None]
        self._plan = StepPlan(
            optimizer.stages,
            executor,
            items,
            self._chains.numbers,
            rows,
            tree.tensors,
            may_begin=True,
        )
        self._is_of_use = not self._plan.others
        """Whether kernels step all leaves."""

    def hypers(self, optimizer: Chain, tree: Tree) -> Hypers | None:
        """Return the hyper-parameters of a step; None if the plan is for another step."""
        if self._form != tree.form or (self._spec is not tree.spec and self._spec != tree.spec):
            return None
        chains = self._chains.of(optimizer)
        return None if chains is None else [one.hypers for one in chains]

    def is_for(self, tree: Tree) -> bool:
        """Return True if all tensors have the layouts of the plan."""
        return self._plan.is_for(tree.tensors)

    def step_(self, tensors: list[Tensor], hypers: Hypers, measured: Sequence[Tensor] = ()) -> bool:
        """Step in place; return False, with nothing changed, if the plan cannot."""
        if not self._is_of_use:
            return False
        steps = self._plan.prepared(tensors, hypers, measured)
        if steps is None:
            return False
        steps.make()
        return True

    def step(self, tree: Tree, hypers: Hypers) -> tuple[Any, Any] | None:
        """Return new parameters and leaf states; None if the plan cannot."""
        if not self._is_of_use:
            return None
        written = self._plan.written
        copies = iter(foreach_clone(list(compress(tree.tensors, written))))
        pairs = zip(tree.tensors, written, strict=True)
        after = [next(copies) if is_written else one for one, is_written in pairs]
        steps = self._plan.prepared(after, hypers)
        if steps is None:
            return None
        steps.make()
        structure, start, end = self._states
        left = iter(after)
        params = [None if one is None else next(left) for one in tree.params]
        states: Any = structure.unflatten(after[start:end])
        for k in self._missing:  # such a leaf is the same object
            states[k] = tree.states[k]
        return tree.spec.unflatten(params), tree.spec.unflatten(states)


_PLANS: list[TreePlan] = []
"""All plans, the latest first."""


def _plans_for(optimizer: Chain, tree: Tree | None) -> Iterator[tuple[TreePlan, Tree, Hypers]]:
    """Yield the plans that fit a step but perhaps for the layouts."""
    if tree is not None:
        for plan in tuple(_PLANS):  # another thread may add one
            hypers = plan.hypers(optimizer, tree)
            if hypers is not None:
                yield plan, tree, hypers


def step_(optimizer: Chain, given: Given, measured: Sequence[Tensor]) -> bool:
    """Step a tree in place by its plan.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
        measured: totals that are known.

    Returns:
        False if no plan makes the step; then nothing was changed.
    """
    listed = _listed(optimizer, given, in_place=True) if _PLANS else None
    for plan, tree, hypers in _plans_for(optimizer, listed):
        if plan.step_(tree.tensors, hypers, measured):
            return True
    return False


def step(optimizer: Chain, given: Given) -> tuple[Any, State] | None:
    """Return parameters and state after a pure step of a tree; None if no plan makes it.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
    """
    listed = _listed(optimizer, given, in_place=False) if _PLANS else None
    for plan, tree, hypers in _plans_for(optimizer, listed):
        is_fixed = all_plain(hypers)  # else there may be a derivative
        if is_fixed and plan.is_for(tree):
            with torch.no_grad():
                made = plan.step(tree, hypers)
            return made and (made[0], State(made[1], given[2].shared))
    return None


def _listed(optimizer: Chain, given: Given, *, in_place: bool) -> Tree | None:
    """List the tensors of a step; None where no plan may make it."""
    if is_transforming():
        return None
    if in_place:
        return tree_of(optimizer, given, in_place=True)
    if has_dispatch_mode() or is_forward_mode() or torch.is_inference_mode_enabled():
        return None
    tree = tree_of(optimizer, given, in_place=False)
    if tree is None or not torch.is_grad_enabled():
        return tree
    return None if any(map(_REQUIRES_GRAD, tree.tensors)) else tree


def learn(
    optimizer: Chain,
    given: Given,
    items: Sequence[Item],
    positions: Sequence[int],
    *,
    in_place: bool,
) -> None:
    """Plan steps like one that was made.

    Args:
        optimizer: that made the step.
        given: parameters, gradients and state.
        items: that were stepped: all with a gradient.
        positions: of the items in the tree.
        in_place: True if the step was made in place.
    """
    if not items:
        return
    if isinstance(next_step(items[0].state.step), Tensor):
        return
    stages, params = optimizer.stages, [item.param for item in items]
    executor = executor_for(optimizer.executor, params, stages)
    is_planned = executor.in_chunks(stages) is not None or executor.in_wholes(stages) is not None
    if not is_planned or not all(is_count(item.state.step) for item in items):
        return
    tree = _listed(optimizer, given, in_place=in_place)
    if tree is None or any(one.is_for(tree) for one, *_ in _plans_for(optimizer, tree)):
        return
    start = len(tree.tensors) - len(items)  # gradients are last
    rows = rows_of(items, tree.tensors, range(start, len(tree.tensors)))
    if rows is None or not tree.has(params, positions):
        return
    with torch.no_grad():
        plan = TreePlan(optimizer, executor, tree, items, positions, rows)
        if plan.is_for(tree):
            _PLANS.insert(0, plan)
            del _PLANS[PLANS:]
