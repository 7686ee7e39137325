"""Plans of the tree doors ``update_`` and ``update``: a StepPlan and what is of trees.

Each step lists the tensors of its trees and hands them to the :class:`StepPlan` of trees with the
same form. ``update`` runs the same plan on copies. What no plan steps goes through
:mod:`functional_optim.plan.engine`.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import foreach_clone
from functional_optim.core.chain import Chain
from functional_optim.core.hyper import all_plain
from functional_optim.core.state import State
from functional_optim.kernels import Executor, executor_for
from functional_optim.plan.item import Item, next_step
from functional_optim.plan.leaf_positions import LeafPositions, rows_of
from functional_optim.plan.step_counts import is_count
from functional_optim.plan.step_plan import StepPlan
from functional_optim.plan.tree import Given, Tree, TreeForm, listed, plans_for

Hypers = list[tuple[Any, ...]]
"""The hyper-parameters of each chain of a tree."""

PLANS = 16
"""Largest number of plans that are kept, for all trees."""


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
        self.form = TreeForm(optimizer, tree, [id(item.hypers) for item in items], positions)
        """Form of the trees."""
        self._missing = [k for k, one in enumerate(tree.grads) if one is None]
        self._plan = StepPlan(
            optimizer.stages,
            executor,
            items,
            self.form.numbers,
            rows,
            tree.tensors,
            may_begin=True,
        )
        self._is_of_use = not self._plan.others
        """Whether kernels step all leaves."""

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
        return self.form.after(tree, after, self._missing)


_PLANS: list[TreePlan] = []
"""All plans, the latest first."""


def step_(optimizer: Chain, given: Given, measured: Sequence[Tensor]) -> bool:
    """Step a tree in place by its plan.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
        measured: totals that are known.

    Returns:
        False if no plan makes the step; then nothing was changed.
    """
    tree = listed(optimizer, given, in_place=True) if _PLANS else None
    for plan, own, chains in plans_for(_PLANS, optimizer, tree):
        if plan.step_(own.tensors, [one.hypers for one in chains], measured):
            return True
    return False


def step(optimizer: Chain, given: Given) -> tuple[Any, State] | None:
    """Return parameters and state after a pure step of a tree; None if no plan makes it.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
    """
    tree = listed(optimizer, given, in_place=False) if _PLANS else None
    for plan, own, chains in plans_for(_PLANS, optimizer, tree):
        hypers = [one.hypers for one in chains]
        is_fixed = all_plain(hypers)  # else there may be a derivative
        if is_fixed and plan.is_for(own):
            with torch.no_grad():
                made = plan.step(own, hypers)
            return made and (made[0], State(made[1], given[2].shared))
    return None


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
    tree = listed(optimizer, given, in_place=in_place)
    if tree is None or any(one.is_for(tree) for one, *_ in plans_for(_PLANS, optimizer, tree)):
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
