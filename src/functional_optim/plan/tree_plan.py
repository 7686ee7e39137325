"""Plans of the tree doors ``update_`` and ``update``, which hold no tensors.

A plan stores what a step calls for leaves with certain layouts: chains, tables, bound kernels. Each
step lists its tensors, and one native call checks their layouts and returns their pointers, which
are an argument of the kernels. ``update`` runs the same plan on copies.

Plans need the native loops. Without them, and for leaves that no kernel can step where they are,
steps go through :mod:`functional_optim.plan.engine`.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_void_p, sizeof
from dataclasses import dataclass
from itertools import accumulate, chain, compress
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
from functional_optim.core.hyper import all_plain, is_plain
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.overrides import paths_of
from functional_optim.core.stage import Stage
from functional_optim.core.state import State
from functional_optim.kernels import Chunks, executor_for
from functional_optim.kernels.chunk_executor import ChunkExecutor
from functional_optim.kernels.chunks import Table, aliased_places, as_chunk, joined
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.kernel import BindScalars, Call
from functional_optim.kernels.packs import LARGE
from functional_optim.native import LOOPS, Loops
from functional_optim.plan.chunks import may_lie_in_table, state_of, stepper_of
from functional_optim.plan.counts import is_count
from functional_optim.plan.item import Item, Made, coefficients_at, next_step
from functional_optim.plan.totals import Totals
from functional_optim.plan.tree import Given, Tree, TreeChains, tree_of

Numbers = list[tuple[tuple[Any, ...], float]]
"""For each chunk of a plan, its hyper-parameters and the number of its step."""

PLANS = 16
"""Largest number of plans that are kept, for all trees."""

_REQUIRES_GRAD = attrgetter("requires_grad")


_LISTS = ChunkExecutor(listing=ForeachKernel(on_cpu=True))
"""Steps leaves on the CPU for which there is no loop, such as those of 16-bit floats."""


@dataclass
class _Chunk:
    """Leaves that one call of a kernel steps. Tensors are known by their positions in the list."""

    executor: Chunks
    chain: int
    """The number of the chain that the leaves share."""
    steps: list[int]
    """The step count of each leaf."""
    longest: int
    """The position of the longest leaf in the tree."""
    columns: list[tuple[int, ...]]
    """All parameters, all gradients, and so on, of the leaves that are stepped as lists."""
    alone: list[int]
    """The positions in the tree of all others, which are stepped one by one."""
    pointers: slice
    """The bytes of the pointers to all tensors, leaf by leaf."""
    table: Table | None
    """The lengths of the leaves, if a kernel may take pointers: then it is asked first."""
    bound: BindScalars | None = None
    """The kernel that takes pointers, bound to the last choices among the coefficients."""
    retry: float = 0.0
    """The step from which a kernel that took no pointers is asked again."""

    def bind(
        self,
        stages: Sequence[Stage],
        tree: Tree,
        made: Made,
        pointers: bytes,
        totals: Sequence[Tensor],
    ) -> list[Call]:
        """Bind a step; an empty list if no kernel makes it."""
        bound = self.bound
        if self.table is not None:
            table = Table(*self.table[:3], pointers[self.pointers])
            call = None if bound is None else bound(made.coefficients, table, totals)
            if call is None and (bound is not None or made.step >= self.retry):
                like = _chunk_at(self.longest, tree, made)
                bound = like and self.executor.bind_table(stages, like, table.elements)
                call = None if bound is None else bound(made.coefficients, table, totals)
                self.bound, self.retry = bound, 1.25 * float(made.step)
            if call is not None:
                return [call]
        every = [_chunk_at(k, tree, made) for k in (self.longest, *self.alone)]
        leaves = [one for one in every if one is not None]
        if len(leaves) < len(every):
            return []
        like, *alone = leaves
        self.executor.require(stages, [like])
        calls = [self.executor.bind_chunk(stages, one, totals) for one in alone]
        if self.columns:
            columns = [[tree.tensors[k] for k in column] for column in self.columns]
            lists = self.executor if self.table is None else _LISTS
            call = lists.bind_lists(stages, like, columns, totals)
            return [] if call is None else [*calls, call]
        return calls


def _chunk_at(position: int, tree: Tree, made: Made) -> Leaf | None:
    """Return a leaf as a chunk."""
    leaf = tree.leaf(position, made.coefficients)
    return as_chunk(leaf._replace(hypers=made.hypers, step=made.step))


class _Plan:
    """A step of leaves with certain layouts.

    Args:
        optimizer: that made such a step.
        executor: that binds kernels.
        tree: that was stepped.
        items: the leaves that were stepped.
        positions: of the items in the tree.
        groups: the items that one call steps; none if no kernel steps all items.
        loops: that look at tensors.
    """

    def __init__(
        self,
        optimizer: Chain,
        executor: Chunks,
        tree: Tree,
        items: Sequence[Item],
        positions: Sequence[int],
        groups: Sequence[list[int]],
        loops: Loops,
    ) -> None:
        paths, params = paths_of(tree.spec), [item.param for item in items]
        marks = [id(item.hypers) for item in items]
        self._spec, self._form, self._loops = tree.spec, tree.form, loops
        self._chains = TreeChains(optimizer, marks, [paths[k] for k in positions], params)
        walks = map(loops.walk, (*tree.params, *tree.states, *tree.grads))
        starts = list(accumulate([len(one[0]) if one else 0 for one in walks], initial=0))
        size = len(tree.params)
        of_states, of_grads = starts[size : 2 * size + 1], starts[2 * size :]
        states: Any = tree.states
        self._states = optree.tree_structure(states), of_states[0], of_states[-1]
        self._steps = [of_states[k] for k in positions]
        rows = [
            [starts[k], of_grads[k], *range(of_states[k] + 1, of_states[k + 1])] for k in positions
        ]
        changed, counted = {k for row in rows for k in (row[0], *row[2:])}, set(self._steps)
        self._changed = [k in changed for k in range(starts[-1])]
        self._written = [k in changed or k in counted for k in range(starts[-1])]
        """For each tensor, whether a kernel writes to it, and whether the step does."""
        slots = [-1] * starts[-1]
        for slot, k in enumerate(chain.from_iterable(rows[k] for own in groups for k in own)):
            slots[k] = slot
        self.layout = loops.lay_out(tree.tensors, self._written, slots)
        self._chunks: list[_Chunk] = []
        end = 0
        for own in groups:
            start, end = end, end + sizeof(c_void_p) * sum(len(rows[k]) for k in own)
            lengths = [params[k].numel() for k in own]
            by_table = executor.joins and params[own[0]].is_cpu
            is_alone = [by_table and not _may_be_listed(items[k]) for k in own]
            listed = [rows[k] for k, one in zip(own, is_alone, strict=True) if not one]
            self._chunks.append(
                _Chunk(
                    executor,
                    self._chains.numbers[own[0]],
                    [self._steps[k] for k in own],
                    positions[own[lengths.index(max(lengths))]],
                    list(zip(*listed, strict=True)),
                    [positions[k] for k in compress(own, is_alone)],
                    slice(start, end),
                    Table.of(lengths, ()) if by_table else None,
                )
            )
        members = [[positions[k] for k in own] for own in groups]
        self._totals = Totals(optimizer.stages, members, tree.params)

    def numbers(self, optimizer: Chain, tree: Tree) -> Numbers | None:
        """Return the numbers of a step; None if the plan is for another step."""
        if self._form != tree.form or (self._spec is not tree.spec and self._spec != tree.spec):
            return None
        chains = self._chains.of(optimizer)
        if chains is None:
            return None
        numbers = []
        for chunk in self._chunks:  # as a rule one
            made = self._loops.common([tree.tensors[k] for k in chunk.steps])
            if made is None or made is False:
                return None
            numbers.append((chains[chunk.chain].hypers, made + 1.0))
        return numbers

    def has_layout_of(self, tree: Tree) -> bool:
        """Return True if all tensors have the layouts of the plan."""
        return self._loops.hold(self.layout, tree.tensors, False)

    def step_(
        self,
        stages: Sequence[Stage],
        tree: Tree,
        numbers: Numbers,
        measured: Sequence[Tensor] = (),
    ) -> bool:
        """Step in place; return False, with nothing changed, if the plan cannot."""
        pointers = self._loops.locate(self.layout, tree.tensors)
        if pointers is None:
            return False
        made = [
            Made(*coefficients_at(stages, hypers, step, plain=all(map(is_plain, hypers))), step)
            for hypers, step in numbers
        ]
        totals = measured
        if len(measured) < self._totals.count:
            coefficients = [one.coefficients for one in made]
            grads = [one for one in tree.grads if one is not None]
            executor = self._chunks[0].executor
            totals = self._totals.of(executor, coefficients, grads, measured, tree.leaf)
        calls: list[Call] = []
        for chunk, one in zip(self._chunks, made, strict=True):
            bound = chunk.bind(stages, tree, one, pointers, totals)
            if not bound:
                return False
            calls += bound
        self._loops.bump(list(compress(tree.tensors, self._changed)))
        for call in calls:
            call()
        self._loops.advance_each([tree.tensors[k] for k in self._steps])
        return True

    def step(self, stages: Sequence[Stage], tree: Tree, numbers: Numbers) -> tuple[Any, Any] | None:
        """Return new parameters and leaf states; None if the plan cannot."""
        copies = iter(foreach_clone(list(compress(tree.tensors, self._written))))
        pairs = zip(tree.tensors, self._written, strict=True)
        after = [next(copies) if is_written else one for one, is_written in pairs]
        spec, start, stop = self._states
        left = iter(after)
        params = [None if one is None else next(left) for one in tree.params]
        states: Any = spec.unflatten(after[start:stop])
        on_copies = tree._replace(params=params, states=states, tensors=after)
        if not self.step_(stages, on_copies, numbers):
            return None
        return tree.spec.unflatten(params), tree.spec.unflatten(states)


_PLANS: list[_Plan] = []
"""All plans, the latest first."""


def _plans_for(optimizer: Chain, tree: Tree | None) -> Iterator[tuple[_Plan, Tree, Numbers]]:
    """Yield the plans that fit a step but perhaps for the layouts."""
    if tree is not None:
        for plan in tuple(_PLANS):  # another thread may add one
            numbers = plan.numbers(optimizer, tree)
            if numbers is not None:
                yield plan, tree, numbers


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
    for plan, tree, numbers in _plans_for(optimizer, listed):
        if numbers and plan.step_(optimizer.stages, tree, numbers, measured):
            return True
    return False


def step(optimizer: Chain, given: Given) -> tuple[Any, State] | None:
    """Return parameters and state after a pure step of a tree; None if no plan makes it.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
    """
    listed = _listed(optimizer, given, in_place=False) if _PLANS else None
    for plan, tree, numbers in _plans_for(optimizer, listed):
        is_fixed = all_plain([hypers for hypers, _ in numbers])  # else there may be a derivative
        if numbers and is_fixed and plan.has_layout_of(tree):
            with torch.no_grad():
                made = plan.step(optimizer.stages, tree, numbers)
            return made and (made[0], State(made[1], given[2].shared))
    return None


def _listed(optimizer: Chain, given: Given, *, in_place: bool) -> Tree | None:
    """List the tensors of a step; None where no plan may make it."""
    if LOOPS.loaded is None or is_transforming():
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
    step = next_step(items[0].state.step)
    # A tree of few leaves is worth a compiler once it has made many steps.
    loops = None if isinstance(step, Tensor) else LOOPS.get(len(items) * int(step))
    if loops is None:
        return
    stages, params = optimizer.stages, [item.param for item in items]
    executor = stepper_of(stages, executor_for(optimizer.executor, params, stages), items)
    if executor is None or not all(is_count(item.state.step) for item in items):
        return
    tree = _listed(optimizer, given, in_place=in_place)
    if tree is None or any(one.has_layout_of(tree) for one, *_ in _plans_for(optimizer, tree)):
        return
    with torch.no_grad():
        groups = _groups(stages, executor, items)
        if groups is not None:
            plan = _Plan(optimizer, executor, tree, items, positions, groups, loops)
            if plan.layout is not None:
                _PLANS.insert(0, plan)
                del _PLANS[PLANS:]


def _groups(
    stages: Sequence[Stage], executor: Chunks, items: Sequence[Item]
) -> list[list[int]] | None:
    """Return the leaves that one call steps; none if a leaf has no kernel.

    None if leaves share memory, since others of the same layouts may not.
    """
    if not all(may_lie_in_table(one) for item in items for one in (*state_of(item), item.grad)):
        return []
    marks: dict[Any, tuple[int]] = {}  # one object for all leaves of a chain at one step
    leaves: list[Leaf] = []
    left: list[Leaf] = []
    for param, grad, state, hypers, name in items:
        mark = marks.setdefault((id(hypers), int(state.step)), (len(marks),))
        leaves.append(Leaf(param, grad, state.stages, mark, name))
    order = {id(leaf): k for k, leaf in enumerate(leaves)}
    found = []
    for alike in joined(stages, leaves, left):
        like, own = alike[0][0], [order[id(leaf)] for leaf, _ in alike]
        by_table = executor.joins and like.param.is_cpu
        by_lists = executor.takes_lists(like) and all(_is_uniform(items[k]) for k in own)
        if not (by_table or by_lists):
            return []
        found.append(own)
    if left:
        return None if aliased_places(leaves) else []
    # A leaf without elements is only counted, unless a stage measures it.
    is_whole = sum(map(len, found)) == len(leaves)
    return found if is_whole or not any(map(is_measured, stages)) else []


def _is_uniform(item: Item) -> bool:
    """Return True if all tensors of a leaf have one shape and layout."""
    return len({(one.shape, one.stride()) for one in (*state_of(item), item.grad)}) == 1


def _may_be_listed(item: Item) -> bool:
    """Return True if a leaf is small, so that lists save more than passes over memory cost."""
    return item.param.numel() < LARGE and _is_uniform(item)
