"""Trees that are stepped in place again and again, and what is planned for each.

A tree is known by its first parameter. What is planned for it is forgotten as soon as one of the
tensors goes that were given: nothing is held in memory for it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.forms import map_state
from functional_optim.core.state import GateCounts, LeafState, State
from functional_optim.plan.flat_tree import FlatTree, flat_tree
from functional_optim.plan.guard import MemoryGuard
from functional_optim.plan.leaf_group import ChainGuard, LeafGroup

PLANS = 8
"""How many plans are kept of one tree: for so many sets of missing gradients, and optimizers."""

_IS_LEAF = attrgetter("is_leaf")


class TreeGuard:
    """Guard: a step is of the tree and the chain of a plan, at the same addresses.

    Args:
        optimizer: for which it was planned.
        tree: what was given.
        groups: of its leaves.
    """

    def __init__(self, optimizer: Chain, tree: FlatTree, groups: Sequence[LeafGroup]) -> None:
        self.chain = ChainGuard(optimizer, groups)
        self._spec, self._state_form = tree.spec, tree.state_form
        self._guard = MemoryGuard(tree.tensors)

    def holds(self, optimizer: Chain, tree: FlatTree) -> bool:
        """Return True if it is."""
        return (
            self._spec == tree.spec
            and self._state_form == tree.state_form
            and self._guard.hold(tree.tensors)
            and self.chain.holds(optimizer)
        )


class Planned(Protocol):
    """Interface of a plan for a tree."""

    def is_for(self, optimizer: Chain, tree: FlatTree) -> bool:
        """Return True if it is for this step of it."""


_Plan = TypeVar("_Plan", bound=Planned)


class _Known(Generic[_Plan]):
    """The plans of a tree that was stepped before, as long as all tensors of it are there."""

    def __init__(self, first: Tensor, forget: Callable[[Any], None]) -> None:
        self.first = ref(first, forget)
        self.plans: list[_Plan] = []
        self._watched: dict[int, Any] = {}

    def keep(self, planned: _Plan, tensors: Sequence[Tensor]) -> None:
        """Keep a plan."""
        if len(self.plans) >= PLANS:
            self._forget()
        self.plans.append(planned)
        for one in tensors:
            if id(one) not in self._watched:
                self._watched[id(one)] = ref(one, self._forget)

    def _forget(self, _: Any = None) -> None:
        self.plans.clear()
        self._watched.clear()


class KnownTrees(Generic[_Plan]):
    """Keeps what is planned for trees, from their second step on."""

    def __init__(self) -> None:
        self._known: dict[int, _Known[_Plan]] = {}  # by the identity of the first parameter

    def __len__(self) -> int:
        return len(self._known)

    def find(self, optimizer: Chain, tree: FlatTree) -> _Plan | None:
        """Return the plan of a step."""
        known = self._known.get(id(tree.tensors[0]))
        for one in () if known is None else known.plans:
            if one.is_for(optimizer, tree):
                return one
        return None

    def is_known(self, tree: FlatTree) -> bool:
        """Return True if it was stepped before; it is from now on."""
        first = tree.tensors[0]
        known = self._known.get(id(first))
        if known is not None and known.first() is first:
            return True
        self._known[id(first)] = _Known(first, partial(self._forget, id(first)))
        return False

    def keep(self, tree: FlatTree, planned: _Plan, before: _Plan | None = None) -> None:
        """Keep what is planned for a tree that is known, perhaps in the place of another plan."""
        known = self._known[id(tree.tensors[0])]
        if before in known.plans:  # unless a tensor of another state went in the meantime
            known.plans.remove(before)
        known.keep(planned, tree.tensors)

    def _forget(self, place: int, _: Any) -> None:
        self._known.pop(place, None)


def writable(optimizer: Chain, given: tuple[Any, Any, State]) -> FlatTree | None:
    """Parameters, gradients and state; None where no plan is for them, or one is a result."""
    tree = flat_tree(optimizer.namespace, *given, in_place=True)
    return tree if tree is not None and all(map(_IS_LEAF, tree.tensors)) else None


def on_the_same_memory(state: LeafState) -> LeafState:
    """Return a state in other tensors on its memory, so that the given ones are not kept."""
    stages = tuple(map_state(Tensor.detach, one) for one in state.stages)
    gates = tuple(GateCounts(one.runs.detach(), one.held.detach()) for one in state.gates)
    return LeafState(state.step.detach(), stages, gates)
