"""Planned steps in place of trees whose leaves have one chain.

A step is planned when parameters are stepped for the second time. A plan holds other tensors on the
same memory.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.overrides import paths_of
from functional_optim.core.state import State
from functional_optim.kernels import EXECUTORS, in_place
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.plan.flat_tree import FlatTree
from functional_optim.plan.item import Item
from functional_optim.plan.known_trees import KnownTrees, TreeGuard, on_the_same_memory, writable
from functional_optim.plan.leaf_group import groups_of
from functional_optim.plan.step_plan import Memory, StepPlan

_HYPERS = attrgetter("hypers")


class TreePlan:
    """A plan, and the step that it is for.

    Args:
        optimizer: that made it.
        tree: what was given.
        items: the leaves that have a gradient.
        positions: of these among the leaves of the tree.
    """

    def __init__(
        self, optimizer: Chain, tree: FlatTree, items: Sequence[Item], positions: Sequence[int]
    ) -> None:
        every = paths_of(tree.spec)
        params = [item.param for item in items]
        marks = [id(item.hypers) for item in items]
        groups, numbers = groups_of(marks, [every[k] for k in positions], params)
        self._missing, self._guard = tree.missing, TreeGuard(optimizer, tree, groups)
        with torch.no_grad():
            others = [
                item._replace(param=item.param.detach(), state=on_the_same_memory(item.state))
                for item in items
            ]
        executor = EXECUTORS[in_place(optimizer.executor, params, optimizer.stages)]
        self._plan = StepPlan(optimizer.stages, executor, others, numbers, memory=Memory.of(others))

        self.is_of_use = self._is_of_use(tree.gradients)
        """Whether a kernel steps any leaf of it where it lies."""

    def _is_of_use(self, gradients: list[Tensor]) -> bool:
        """Without a step; a rule that only says that it is pointwise is left to the reference."""
        if not self._plan.has_chunks or not self._plan.has_common_counts():
            return False
        try:
            return self._plan.prepared(gradients, self._hypers) is not None
        except NotPointwiseError:
            return False

    @property
    def _hypers(self) -> list[tuple[Any, ...]]:
        return list(map(_HYPERS, self._guard.chain.chains))

    def is_for(self, optimizer: Chain, tree: FlatTree) -> bool:
        """Return True if the plan is for these leaves, at these addresses, and these stages."""
        return self._missing == tree.missing and self._guard.holds(optimizer, tree)

    def make(self, gradients: list[Tensor], measured: Sequence[Tensor]) -> bool:
        """The step; False, with nothing changed, where it must be planned anew."""
        return self._plan.has_common_counts() and self._plan.run(gradients, self._hypers, measured)


KNOWN: KnownTrees[TreePlan] = KnownTrees()


def make(optimizer: Chain, given: tuple[Any, Any, State], measured: Sequence[Tensor]) -> bool:
    """The step in place of a tree, if it was planned.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients, and the state.
        measured: totals that are known.

    Returns:
        Whether it was made; otherwise nothing was changed.
    """
    tree = writable(optimizer, given) if KNOWN else None
    planned = None if tree is None else KNOWN.find(optimizer, tree)
    if tree is None or planned is None:
        return False
    return planned.is_of_use and planned.make(tree.gradients, measured)


def learn(
    optimizer: Chain,
    given: tuple[Any, Any, State],
    items: Sequence[Item],
    positions: Sequence[int],
) -> None:
    """Plan the steps after this one, if the tree was stepped before.

    Args:
        optimizer: that made a step.
        given: parameters, gradients, and the state.
        items: that were stepped: all with a gradient.
        positions: of these among the leaves of the tree.
    """
    tree = writable(optimizer, given) if items else None
    if tree is None or not KNOWN.is_known(tree):
        return
    before = KNOWN.find(optimizer, tree)
    if before is None or before.is_of_use:  # leaves stepped together have come to differ in steps
        KNOWN.keep(tree, TreePlan(optimizer, tree, items, positions), before)
