"""Plans of the tree doors ``update_`` and ``update``.

A plan stores what a step calls for leaves with certain layouts: chains, tables, bound kernels. It
holds no tensor. Each step lists its tensors, and one native call checks their layouts and returns
their pointers, which are an argument of the kernels. ``update`` runs the same plan on copies.

Plans need the native loops. Without them, and for leaves that no kernel can step where they are,
steps go through :mod:`functional_optim.plan.engine`.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import (
    foreach_clone,
    has_dispatch_mode,
    is_forward_mode,
    is_transforming,
)
from functional_optim.core.chain import Chain
from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.overrides import paths_of
from functional_optim.core.stage import Stage
from functional_optim.core.state import State
from functional_optim.kernels import Chunks, executor_for
from functional_optim.kernels.chunks import Table, aliased_places, as_chunk, joined, tensors_of
from functional_optim.kernels.kernel import BindScalars, Call
from functional_optim.kernels.totals import total_of
from functional_optim.native import LOOPS, Loops
from functional_optim.plan.chunks import may_lie_in_table, state_of, stepper_of
from functional_optim.plan.counts import is_count
from functional_optim.plan.item import Item, coefficients_at
from functional_optim.plan.tree import Chains, Tree, tree_of

Given = tuple[Any, Any, State]
"""Parameters, gradients and state, as a step is given them."""

PLANS = 16
"""Largest number of plans that are kept, for all trees."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class _Listed(NamedTuple):
    """Tensors of a step."""

    tree: Tree
    tensors: list[Tensor]
    """All parameters, all gradients, then the state leaf by leaf."""
    form: list[Any]
    """Everything but the tensors: classes, lengths, and which gradients are missing."""
    loops: Loops


class _Numbers(NamedTuple):
    """Hyper-parameters and step of the leaves of a chunk."""

    hypers: tuple[Any, ...]
    is_plain: bool
    step: float


class _Chunk:
    """Leaves that one call of a kernel steps.

    Args:
        executor: that binds kernels to them.
        chain: the number of their chain.
        positions: of the leaves in the tree.
        rows: for each leaf, the positions of its tensors: parameter, gradient, state.
        steps: for each leaf, the position of its step count.
        lengths: for each leaf, its number of elements.
        start: the slot of the first pointer; None if the kernel takes lists.
    """

    def __init__(
        self,
        executor: Chunks,
        chain: int,
        positions: Sequence[int],
        rows: Sequence[Sequence[int]],
        steps: list[int],
        lengths: Sequence[int],
        start: int | None,
    ) -> None:
        self.executor, self.chain, self.positions, self.steps = executor, chain, positions, steps
        self._columns = list(zip(*rows, strict=True)) if start is None else []
        size = sum(map(len, rows))
        self._slots = None if start is None else slice(8 * start, 8 * (start + size))
        self._table = Table.of(lengths, ())
        self._longest = positions[max(range(len(lengths)), key=lengths.__getitem__)]
        self._bound: BindScalars | None = None
        self._entries: dict[Any, Any] = {}

    def call(
        self,
        stages: Sequence[Stage],
        listed: _Listed,
        made: tuple[tuple[Any, ...], tuple[Any, ...], float],
        pointers: bytes,
        totals: Sequence[Tensor],
    ) -> Call | None:
        """Bind the step; None if no kernel makes it.

        Args:
            stages: of the chain.
            listed: the tensors of the step.
            made: hyper-parameters, coefficients and the number of the step.
            pointers: of all tensors that have a slot.
            totals: the sum of each measured stage.
        """
        if self._slots is None:
            like = self._like(listed.tree, made)
            if like is None:
                return None
            self.executor.require(stages, [like])
            columns = [[listed.tensors[k] for k in column] for column in self._columns]
            return self.executor.bind_lists(stages, like, columns, totals)
        elements, leaves, lengths, *_ = self._table
        table = Table(elements, leaves, lengths, pointers[self._slots])
        bound = self._bound
        call = None if bound is None else bound(made[1], table, totals)
        if call is None:  # no kernel was bound yet, or other choices are among the coefficients
            like = self._like(listed.tree, made)
            bound = None if like is None else self.executor.bind_table(stages, like, elements)
            call = None if bound is None else bound(made[1], table, totals)
            self._bound = bound
        return call

    def _like(self, tree: Tree, made: tuple[Any, Any, float]) -> Leaf | None:
        """Return the longest leaf, which has everything that a kernel is bound to."""
        k, (hypers, coefficients, step) = self._longest, made
        states = tree.states[k].stages
        leaf = Leaf(tree.params[k], tree.grads[k], states, coefficients, "", hypers, step)
        return as_chunk(leaf._replace(entries=self._entries))


class _Plan:
    """A step of leaves with certain layouts.

    Args:
        optimizer: that made such a step.
        listed: its tensors.
        chains: of the leaves that are stepped.
        chunks: of these leaves; none where no kernel steps them.
        layout: of all tensors.
        written: for each tensor, whether the step writes to it.
        steps: the positions of the step counts.
    """

    def __init__(
        self,
        optimizer: Chain,
        listed: _Listed,
        chains: Chains,
        chunks: Sequence[_Chunk],
        layout: Any,
        written: list[bool],
        steps: list[int],
    ) -> None:
        self._spec, self._form = listed.tree.spec, listed.form
        self._chains, self._chunks = chains, chunks
        self._layout, self._written, self._steps = layout, written, steps
        counted = set(steps)
        self._changed = [one and k not in counted for k, one in enumerate(written)]
        self._measured = sum(map(is_measured, optimizer.stages))

    def numbers(self, optimizer: Chain, listed: _Listed) -> list[_Numbers] | None:
        """Return the numbers of each chunk; None if the plan is for another step."""
        spec = listed.tree.spec
        if self._form != listed.form or (self._spec is not spec and self._spec != spec):
            return None
        chains = self._chains.of(optimizer)
        if chains is None:
            return None
        numbers = []
        for chunk in self._chunks:  # as a rule one
            made = listed.loops.common([listed.tensors[k] for k in chunk.steps])
            if made is None or made is False:
                return None
            hypers = chains[chunk.chain].hypers
            numbers.append(_Numbers(hypers, all(map(is_plain, hypers)), made + 1.0))
        return numbers

    def has_layout_of(self, listed: _Listed) -> bool:
        """Return True if tensors have the layouts of the plan."""
        return listed.loops.hold(self._layout, listed.tensors, False)

    def step_(
        self,
        stages: Sequence[Stage],
        listed: _Listed,
        numbers: Sequence[_Numbers],
        measured: Sequence[Tensor],
    ) -> bool:
        """Step in place; return False, with nothing changed, if the plan cannot."""
        loops, tensors = listed.loops, listed.tensors
        pointers = loops.locate(self._layout, tensors)
        calls = (
            None if pointers is None else self._bind(stages, listed, numbers, measured, pointers)
        )
        if calls is None:
            return False
        loops.bump(list(compress(tensors, self._changed)))
        for call in calls:
            call()
        loops.advance_each([tensors[k] for k in self._steps])
        return True

    def step(
        self, stages: Sequence[Stage], listed: _Listed, numbers: Sequence[_Numbers], shared: Any
    ) -> tuple[Any, State] | None:
        """Return new parameters and state; None if the plan cannot make the step."""
        loops, tree = listed.loops, listed.tree
        with torch.no_grad():
            copies = iter(foreach_clone(list(compress(listed.tensors, self._written))))
            after = [
                next(copies) if is_written else one
                for one, is_written in zip(listed.tensors, self._written, strict=True)
            ]
            pointers = loops.locate(self._layout, after)
            on_copies = listed._replace(tensors=after)
            calls = (
                None if pointers is None else self._bind(stages, on_copies, numbers, (), pointers)
            )
            if calls is None:
                return None
            for call in calls:
                call()
            loops.advance_each([after[k] for k in self._steps])
        params, _, states = loops.rebuild([tree.params, tree.grads, tree.states], after)
        return tree.spec.unflatten(params), State(tree.spec.unflatten(states), shared)

    def _bind(
        self,
        stages: Sequence[Stage],
        listed: _Listed,
        numbers: Sequence[_Numbers],
        measured: Sequence[Tensor],
        pointers: bytes,
    ) -> list[Call] | None:
        """Bind the calls of all chunks; None if no kernel makes one of them."""
        made = [
            (*coefficients_at(stages, hypers, step, plain=plain), step)
            for hypers, plain, step in numbers
        ]
        totals = measured
        if len(measured) < self._measured:
            totals = self._totals(stages, listed.tree, [one[1] for one in made], measured)
        calls = []
        for chunk, one in zip(self._chunks, made, strict=True):
            call = chunk.call(stages, listed, one, pointers, totals)
            if call is None:
                return None
            calls.append(call)
        return calls

    def _totals(
        self,
        stages: Sequence[Stage],
        tree: Tree,
        coefficients: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Return the sums of all measured stages."""
        with torch.no_grad():
            if self._measured == 1 and is_measured(stages[0]):
                return [total_of(stages[0], [one for one in tree.grads if one is not None])]
            numbered = {
                k: own
                for chunk, own in zip(self._chunks, coefficients, strict=True)
                for k in chunk.positions
            }
            leaves = [
                Leaf(tree.params[k], tree.grads[k], tree.states[k].stages, numbered[k], "")
                for k in sorted(numbered)
            ]
            return self._chunks[0].executor.totals(stages, leaves, measured)


_PLANS: list[_Plan] = []
"""The last one is the first."""


def step_(optimizer: Chain, given: Given, measured: Sequence[Tensor]) -> bool:
    """Step a tree in place by its plan.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
        measured: totals that are known.

    Returns:
        False if there is no plan for the step; then nothing was changed.
    """
    listed = _listed(optimizer, given, LOOPS.loaded, in_place=True) if _PLANS else None
    if listed is None:
        return False
    for plan in tuple(_PLANS):  # another thread may add one
        numbers = plan.numbers(optimizer, listed)
        if numbers and plan.step_(optimizer.stages, listed, numbers, measured):
            return True
    return False


def step(optimizer: Chain, given: Given) -> tuple[Any, State] | None:
    """Return parameters and state after a pure step of a tree by its plan; None if it has none.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients and state.
    """
    listed = _listed(optimizer, given, LOOPS.loaded, in_place=False) if _PLANS else None
    if listed is None:
        return None
    for plan in tuple(_PLANS):
        numbers = plan.numbers(optimizer, listed)
        # A number that is not plain may carry a derivative.
        if numbers and all(one.is_plain for one in numbers) and plan.has_layout_of(listed):
            return plan.step(optimizer.stages, listed, numbers, given[2].shared)
    return None


def _listed(
    optimizer: Chain, given: Given, loops: Loops | None, *, in_place: bool
) -> _Listed | None:
    """List the tensors of a step; None where plans do not apply."""
    if loops is None or is_transforming() or torch.compiler.is_compiling():
        return None
    if not in_place and (
        is_forward_mode() or has_dispatch_mode() or torch.is_inference_mode_enabled()
    ):
        return None
    tree = tree_of(optimizer.namespace, *given, in_place=in_place)
    found = None if tree is None else loops.walk([tree.params, tree.grads, tree.states])
    if tree is None or found is None:
        return None
    if not in_place and torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, found[0])):
        return None
    return _Listed(tree, *found, loops)


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
        positions: of the items among the leaves of the tree.
        in_place: True if the step was made in place.
    """
    if not items or is_transforming() or torch.compiler.is_compiling():
        return
    stages, params = optimizer.stages, [item.param for item in items]
    executor = stepper_of(stages, executor_for(optimizer.executor, params, stages), items)
    if executor is None or not all(is_count(item.state.step) for item in items):
        return
    # A tree of few tensors is worth a compiler once it has made many steps.
    made = int(items[0].state.step)
    listed = _listed(
        optimizer,
        given,
        LOOPS.get(made * sum(len(state_of(item)) for item in items)),
        in_place=in_place,
    )
    if listed is None or any(
        one.numbers(optimizer, listed) is not None and one.has_layout_of(listed) for one in _PLANS
    ):
        return
    with torch.no_grad():
        plan = _plan_of(optimizer, executor, listed, items, positions)
    if plan is not None:
        _PLANS.insert(0, plan)
        del _PLANS[PLANS:]


def _plan_of(
    optimizer: Chain,
    executor: Chunks,
    listed: _Listed,
    items: Sequence[Item],
    positions: Sequence[int],
) -> _Plan | None:
    """Plan steps of such leaves; None if another tree like this one may be planned."""
    tree, walk, paths = listed.tree, listed.loops.walk, paths_of(listed.tree.spec)
    every, size = (*tree.params, *tree.grads, *tree.states), len(tree.params)
    starts = list(accumulate([len(walk(one)[0]) for one in every], initial=0))
    of_states = starts[2 * size :]
    rows = [
        [starts[k], starts[size + k], *range(of_states[k] + 1, of_states[k + 1])] for k in positions
    ]
    steps = [of_states[k] for k in positions]
    marks = [id(item.hypers) for item in items]
    chains = Chains(optimizer, marks, [paths[k] for k in positions], [item.param for item in items])
    groups = _groups(optimizer.stages, executor, items, chains.numbers)
    if groups is None:
        return None
    written, slots = [False] * len(listed.tensors), [-1] * len(listed.tensors)
    for (param, _, *state), count in zip(rows, steps, strict=True):
        for k in (param, *state, count):
            written[k] = True
    chunks, start = [], 0
    for by_lists, own in groups:
        own_rows = [rows[k] for k in own]
        for slot, k in enumerate(chain.from_iterable(() if by_lists else own_rows), start):
            slots[k] = slot
        chunks.append(
            _Chunk(
                executor,
                chains.numbers[own[0]],
                [positions[k] for k in own],
                own_rows,
                [steps[k] for k in own],
                [items[k].param.numel() for k in own],
                None if by_lists else start,
            )
        )
        start += 0 if by_lists else sum(map(len, own_rows))
    layout = listed.loops.lay_out(listed.tensors, written, slots)
    return (
        None if layout is None else _Plan(optimizer, listed, chains, chunks, layout, written, steps)
    )


def _groups(
    stages: Sequence[Stage], executor: Chunks, items: Sequence[Item], chains: Sequence[int]
) -> list[tuple[bool, list[int]]] | None:
    """Return the leaves that one call steps, and whether it takes lists.

    Returns:
        An empty list if no kernel steps one of the leaves; None if leaves share memory.
    """
    if not all(may_lie_in_table(one) for item in items for one in (*state_of(item), item.grad)):
        return []
    marks: dict[Any, tuple[int, ...]] = {}  # one object for all leaves of a chain at one step
    leaves = [
        Leaf(
            item.param,
            item.grad,
            item.state.stages,
            marks.setdefault((number, int(item.state.step)), (number,)),
            item.name,
        )
        for item, number in zip(items, chains, strict=True)
    ]
    left: list[Leaf] = []
    order = {id(leaf): k for k, leaf in enumerate(leaves)}
    found = []
    for alike in joined(stages, leaves, left):
        like = alike[0][1]
        by_lists = not (executor.joins and like.param.is_cpu)
        if by_lists and not (executor.takes_lists(like) and all(map(_is_uniform, alike))):
            return []
        found.append((by_lists, [order[id(leaf)] for leaf, _ in alike]))
    if left:
        return None if aliased_places(leaves) else []
    # A leaf without elements is counted only, unless a stage behind another one measures it.
    is_whole = sum(len(own) for _, own in found) == len(leaves)
    return found if is_whole or not any(map(is_measured, stages[1:])) else []


def _is_uniform(pair: tuple[Leaf, Leaf]) -> bool:
    """Return True if all tensors of a leaf have one shape and layout."""
    return len({(one.shape, one.stride()) for one in tensors_of(pair[0])}) == 1
