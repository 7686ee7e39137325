"""Planned steps of trees that are stepped in place again and again.

A step in place of a tree is planned when its parameters are stepped for the second time. What a
plan keeps are other tensors on the same memory, so that it goes as soon as one of the tensors that
were given does: nothing is held in memory for it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.forms import map_state
from functional_optim.core.overrides import paths_of
from functional_optim.core.state import LeafState, State
from functional_optim.kernels import EXECUTORS, in_place
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.plan.engine import Item
from functional_optim.plan.flat_tree import FlatTree, flat_tree
from functional_optim.plan.leaf_group import LeafGroup
from functional_optim.plan.places import Places
from functional_optim.plan.step_plan import Memory, StepPlan

PLANS = 8
"""For how many sets of missing gradients, and optimizers, plans of one tree are kept."""

_IS_LEAF = attrgetter("is_leaf")
_WHERE = itemgetter(0)


class _Planned:
    """A plan, and the step that it is for.

    Args:
        optimizer: that made it.
        tree: what was given.
        items: the leaves that have a gradient.
        positions: of these among the leaves of the tree.
    """

    def __init__(
        self,
        optimizer: Chain,
        tree: FlatTree,
        items: Sequence[Item],
        positions: Sequence[int],
    ) -> None:
        self._stages, self._executor = optimizer.stages, optimizer.executor
        self._links, self._overrides = optimizer.links, optimizer.overrides
        self._tree = tree.without_tensors()
        self._places = Places(tree.tensors)
        paths = paths_of(tree.spec)
        members: dict[int, list[int]] = {}
        for k, item in enumerate(items):
            members.setdefault(id(item.hypers), []).append(k)
        self._groups: list[LeafGroup] = []
        numbers = [0] * len(items)
        for number, places in enumerate(members.values()):
            params = [items[k].param for k in places]
            self._groups.append(LeafGroup.of(paths[positions[places[0]]], params))
            for k in places:
                numbers[k] = number
        self._hypers = [items[places[0]].hypers for places in members.values()]
        with torch.no_grad():
            others = list(map(_on_the_same_memory, items))
        executor = EXECUTORS[in_place(optimizer.executor, [item.param for item in items])]
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

    def is_for(self, optimizer: Chain, tree: FlatTree) -> bool:
        """Whether these are the leaves of the plan, where they were, and these its stages."""
        mine = self._tree
        return (
            mine.missing == tree.missing
            and self._executor == optimizer.executor
            and (self._links is optimizer.links or self._stages == optimizer.stages)
            and mine.spec == tree.spec
            and mine.state_spec == tree.state_spec
            and self._places.hold(tree.tensors)
            and self._takes(optimizer)
        )

    def make(self, gradients: list[Tensor], measured: Sequence[Tensor]) -> bool:
        """The step; False, with nothing changed, where it must be planned anew."""
        return self._plan.has_common_counts() and self._plan.run(gradients, self._hypers, measured)

    def _takes(self, optimizer: Chain) -> bool:
        """Whether the hyper-parameters of a step ask for the state that there is."""
        if self._links is optimizer.links and self._overrides is optimizer.overrides:
            return True
        if list(map(_WHERE, self._overrides)) != list(map(_WHERE, optimizer.overrides)):
            return False
        hypers = [group.hypers(optimizer) for group in self._groups]
        for group, old, new in zip(self._groups, self._hypers, hypers, strict=True):
            if not group.ask_alike(self._stages, old, new):
                return False
        self._links, self._overrides, self._hypers = optimizer.links, optimizer.overrides, hypers
        return True


class _Known:
    """The plans of a tree that was stepped before, as long as all tensors of it are there."""

    def __init__(self, first: Tensor, forget: Callable[[Any], None]) -> None:
        self.first = ref(first, forget)
        self.plans: list[_Planned] = []
        self._watched: dict[int, Any] = {}

    def keep(self, planned: _Planned, tensors: Sequence[Tensor]) -> None:
        """One more plan."""
        if len(self.plans) >= PLANS:
            self._forget()
        self.plans.append(planned)
        for one in tensors:
            if id(one) not in self._watched:
                self._watched[id(one)] = ref(one, self._forget)

    def _forget(self, _: Any = None) -> None:
        self.plans.clear()
        self._watched.clear()


_KNOWN: dict[int, _Known] = {}
"""By the identity of the first parameter."""


def make(optimizer: Chain, given: tuple[Any, Any, State], measured: Sequence[Tensor]) -> bool:
    """The step in place of a tree, if it was planned.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients, and the state.
        measured: totals that are known.

    Returns:
        Whether it was made; otherwise nothing was changed.
    """
    if not _KNOWN:
        return False
    tree = _writable(optimizer.namespace, given)
    known = None if tree is None else _KNOWN.get(id(tree.tensors[0]))
    if tree is None or known is None:
        return False
    for planned in known.plans:
        if planned.is_for(optimizer, tree):
            return planned.is_of_use and planned.make(tree.gradients, measured)
    return False


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
    tree = _writable(optimizer.namespace, given) if items else None
    if tree is None:
        return
    first = tree.tensors[0]
    place = id(first)
    known = _KNOWN.get(place)
    if known is None or known.first() is not first:
        _KNOWN[place] = _Known(first, partial(_forget, place))
        return
    before = next((one for one in known.plans if one.is_for(optimizer, tree)), None)
    if before is not None:
        if not before.is_of_use:
            return
        known.plans.remove(before)  # leaves that it steps together have come to differ in steps
    known.keep(_Planned(optimizer, tree, items, positions), tree.tensors)


def _forget(place: int, _: Any) -> None:
    _KNOWN.pop(place, None)


def _writable(namespace: str, given: tuple[Any, Any, State]) -> FlatTree | None:
    """What is given; None where no plan is for it, or it is the result of an operation."""
    tree = flat_tree(namespace, *given)
    return tree if tree is not None and all(map(_IS_LEAF, tree.tensors)) else None


def _on_the_same_memory(item: Item) -> Item:
    """The same leaf in other tensors: the ones that were given are not kept."""
    states = tuple(map_state(Tensor.detach, one) for one in item.state.stages)
    state = LeafState(item.state.step.detach(), states)
    param = item.param.detach()
    return item._replace(param=param, state=state)
