"""Planned pure steps: new tensors are made all at once, and kernels step these where they lie.

A plan holds no tensor, so it serves every tree of its kind. It is for executors with kernels: a
pure step by the reference runs the stages themselves.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import (
    foreach_clone,
    has_dispatch_mode,
    is_forward_mode,
    is_transforming,
)
from functional_optim.core.chain import Chain
from functional_optim.core.forms import map_state
from functional_optim.core.hyper import all_plain
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.overrides import paths_of
from functional_optim.core.stage import Stage
from functional_optim.core.state import State, state_tensors
from functional_optim.core.tree import flatten
from functional_optim.kernels import EXECUTORS
from functional_optim.kernels.chunks import Table, as_chunk, with_tensors
from functional_optim.kernels.kernel import BindScalars
from functional_optim.native import LOOPS, Loops
from functional_optim.plan.chunk import Chunk
from functional_optim.plan.chunks import chunks_of
from functional_optim.plan.flat_tree import FlatTree, flat_tree
from functional_optim.plan.item import Item, coefficients_at
from functional_optim.plan.leaf_group import ChainGuard, LeafGroup

PLANS = 16
"""How many plans are kept, of all trees."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class _PureChunk:
    """Leaves that one call of a kernel steps.

    Args:
        stages: of the chain.
        chunk: of the leaves.
        items: all leaves of the step.
        places: where each tensor is among all tensors of a step, by identity.
        loops: that look at tensors.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        chunk: Chunk,
        items: Sequence[Item],
        places: dict[int, int],
        loops: Loops,
    ) -> None:
        own = [items[k] for k in chunk.members]
        every = [_tensors(item) for item in own]
        tensors = [one for leaf in every for one in leaf]
        longest = max(range(len(own)), key=lambda k: own[k].param.numel())
        start = sum(map(len, every[:longest]))
        self._stages, self._lanes, self._table = stages, chunk.executor, Table.of_tensors(every)
        self._hypers = own[0].hypers
        self._steps = _picking([places[id(item.state.step)] for item in own])
        self._tensors = _picking([places[id(one)] for one in tensors])
        self._longest = slice(start, start + len(every[longest]))
        self._leaf = _without_memory(own[longest])
        self._like, self._nowhere = loops.remember(tensors), loops.remember([])
        self._coefficients: tuple[Any, ...] = ()
        self._feed: BindScalars | None = None

    def is_for(self, hypers: tuple[Any, ...], before: list[Tensor], loops: Loops) -> bool:
        """Return True if leaves are like those that the plan was made of."""
        made = loops.common(self._steps(before))
        if made is None or made is False:
            return False
        if not all_plain([hypers]):
            return False  # a number that carries a derivative, or is another at each step
        self._hypers = hypers
        self._coefficients = coefficients_at(self._stages, hypers, made + 1.0, plain=True)[1]
        return loops.hold(self._like, self._tensors(before), False)

    def call(self, tensors: list[Tensor], loops: Loops) -> Callable[[], object] | None:
        """Bind the step of the leaves that were found last; None if no kernel makes it.

        Args:
            tensors: of the step; those of the leaves are written to by the call.
            loops: that look at tensors.
        """
        own = self._tensors(tensors)
        addresses = loops.addresses(self._like, own, self._nowhere)
        if addresses is None:
            return None
        table = self._table._replace(addresses=addresses)
        call = None if self._feed is None else self._feed(self._coefficients, table, ())
        if call is None:
            leaf = as_chunk(with_tensors(self._leaf, own[self._longest]))
            if leaf is None:
                return None
            step = loops.common(self._steps(tensors)) + 1.0
            like = leaf._replace(hypers=self._hypers, coefficients=self._coefficients, step=step)
            self._feed = self._lanes.bind_table(self._stages, like, table.elements)
            call = None if self._feed is None else self._feed(self._coefficients, table, ())
        return call


class _PurePlan:
    """A pure step of trees of one kind.

    Args:
        optimizer: that makes it.
        given: an example of parameters, gradients and state.
        tree: the same.
        items: its leaves that have a gradient.
        positions: of these among the leaves.
        chunks: of the items, all of them; none where no kernel steps these where they lie, which is
            then known.
        loops: that look at tensors.
    """

    def __init__(
        self,
        optimizer: Chain,
        given: tuple[Any, Any, State],
        tree: FlatTree,
        items: Sequence[Item],
        positions: Sequence[int],
        chunks: Sequence[Chunk],
        loops: Loops,
    ) -> None:
        self._tree = tree.without_tensors()
        self._after = Unflatten(optimizer.namespace, given, tree)
        self._like = None if chunks else loops.remember(tree.tensors)
        places = {id(one): k for k, one in enumerate([*tree.tensors, *tree.gradients])}
        steps = [item.state.step for item in items]
        written = [one for item in items for one in _tensors(item) if one is not item.grad]
        self._count = len(steps)
        self._written = [places[id(one)] for one in (*written, *steps)]
        self._pick = _picking(self._written)
        paths = paths_of(tree.spec)
        groups = [
            LeafGroup.of(
                paths[positions[chunk.members[0]]], [items[k].param for k in chunk.members]
            )
            for chunk in chunks
        ]
        self._chain = ChainGuard(optimizer, groups)
        self._parts = [_PureChunk(optimizer.stages, one, items, places, loops) for one in chunks]

    def is_for(self, optimizer: Chain, tree: FlatTree, loops: Loops) -> bool:
        """Return True if it is a step of such a tree by these stages."""
        mine, before = self._tree, [*tree.tensors, *tree.gradients]
        return (
            mine.missing == tree.missing
            and mine.spec == tree.spec
            and mine.state_form == tree.state_form
            and (self._like is None or loops.hold(self._like, tree.tensors, False))
            and self._chain.holds(optimizer)
            and all(
                part.is_for(chain.hypers, before, loops)
                for part, chain in zip(self._parts, self._chain.chains, strict=True)
            )
        )

    def make(self, tree: FlatTree, loops: Loops) -> tuple[Any, State] | None:
        """The step of a tree that it is for; None where no kernel makes it."""
        if not self._parts:
            return None
        after = [*tree.tensors, *tree.gradients]
        with torch.no_grad():
            if None in [part.call(after, loops) for part in self._parts]:
                return None  # before anything is copied
            copies = foreach_clone(self._pick(after))
            for place, one in zip(self._written, copies, strict=True):
                after[place] = one
            for part in self._parts:
                call = part.call(after, loops)
                assert call is not None, "it was there for the tensors that were given"
                call()
            loops.advance_each(list(copies[-self._count :]))
        return self._after.of(after)


class Unflatten:
    """Makes parameters and state of tensors.

    Args:
        namespace: of optree.
        given: an example of parameters, gradients and state.
        tree: the same.
    """

    def __init__(self, namespace: str, given: tuple[Any, Any, State], tree: FlatTree) -> None:
        every, spec = flatten((given[0], given[2]), namespace)
        self._unflatten: Any = spec.unflatten
        places = {id(one): place for place, one in enumerate(tree.tensors)}
        self._nothing = [place for place, one in enumerate(every) if one is None]
        self._pick = _picking([places[id(one)] for one in every if one is not None])

    def of(self, tensors: list[Tensor]) -> tuple[Any, State]:
        """Return the results made of other tensors, in the order of the tree's."""
        every: list[Any] = self._pick(tensors)
        for place in self._nothing:
            every.insert(place, None)
        made: tuple[Any, State] = self._unflatten(every)
        return made


_KEPT: list[_PurePlan] = []
"""The last one that was made is the first."""


def make(optimizer: Chain, given: tuple[Any, Any, State]) -> tuple[Any, State] | None:
    """The step, if it was planned: new parameters, and the new state.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients, and the state.

    Returns:
        None where no plan is for it.
    """
    if not _KEPT or not _has_kernels(optimizer):
        return None
    tree = without_derivative(optimizer.namespace, given)
    loops = None if tree is None else LOOPS.get(len(tree.tensors))
    if tree is None or loops is None:
        return None
    plan = next((one for one in _KEPT if one.is_for(optimizer, tree, loops)), None)
    return None if plan is None else plan.make(tree, loops)


def learn(
    optimizer: Chain,
    given: tuple[Any, Any, State],
    items: Sequence[Item],
    positions: Sequence[int],
) -> None:
    """Plan the steps of trees like one that was stepped.

    Args:
        optimizer: that made the step.
        given: parameters, gradients, and the state.
        items: that were stepped: all with a gradient.
        positions: of these among the leaves of the tree.
    """
    if not _has_kernels(optimizer) or any(map(is_measured, optimizer.stages)):
        return
    tree = without_derivative(optimizer.namespace, given)
    loops = None if tree is None else LOOPS.get(len(tree.tensors))
    if tree is None or loops is None or not tree.is_plain:
        return
    if any(one.is_for(optimizer, tree, loops) for one in _KEPT):
        return  # no kernel makes it yet
    groups: dict[int, int] = {}
    own = [groups.setdefault(id(item.hypers), len(groups)) for item in items]
    with torch.no_grad():
        chunks = chunks_of(optimizer.stages, EXECUTORS[optimizer.executor], items, own)
    known = sum(len(chunk.members) for chunk in chunks)
    joins = all(chunk.executor.joins and chunk.like.param.is_cpu for chunk in chunks)
    if known < len(items) or not joins:
        chunks = []
    _KEPT.insert(0, _PurePlan(optimizer, given, tree, items, positions, chunks, loops))
    del _KEPT[PLANS:]


def _has_kernels(optimizer: Chain) -> bool:
    """Return True if its executor steps leaves of its chain by kernels."""
    if torch.compiler.is_compiling():
        return False
    return EXECUTORS[optimizer.executor].in_chunks(optimizer.stages) is not None


def without_derivative(namespace: str, given: tuple[Any, Any, State]) -> FlatTree | None:
    """Flatten a step's arguments; None if derivatives may be needed or calls are recorded."""
    if is_forward_mode() or is_transforming() or has_dispatch_mode():
        return None
    tree = flat_tree(namespace, *given)
    if tree is None or not torch.is_grad_enabled():
        return tree
    wanted = any(map(_REQUIRES_GRAD, tree.tensors)) or any(map(_REQUIRES_GRAD, tree.gradients))
    return None if wanted else tree


def _tensors(item: Item) -> list[Tensor]:
    """Parameter, gradient, and the tensors of the state, but for the step count."""
    return [item.param, item.grad, *state_tensors(item.state.stages)]


def _without_memory(item: Item) -> Leaf:
    """A leaf of no element, with the fields and dtypes of another."""

    def empty(tensor: Tensor) -> Tensor:
        return tensor.new_empty(0)

    states = tuple(map_state(empty, one) for one in item.state.stages)
    return Leaf(empty(item.param), empty(item.grad), states, (), item.name)


def _picking(places: Sequence[int]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function that gives what stands at these places."""
    if len(places) == 1:
        return lambda tensors: [tensors[places[0]]]
    pick = itemgetter(*places)
    return lambda tensors: list(pick(tensors))
