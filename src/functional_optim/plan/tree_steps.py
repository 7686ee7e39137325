"""TreeSteps: planned steps of trees, for ``update_`` and, on copies, for ``update``.

Plans are found by the form of a tree, and hold no tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.hyper import is_all_plain
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.leaf import PLAIN
from functional_optim.core.overrides import HYPERS, LeafChain
from functional_optim.core.state import Shared, State
from functional_optim.core.tree import unflatten
from functional_optim.kernels import Executor
from functional_optim.plan import leaf_by_leaf
from functional_optim.plan.addend_rows import is_simple
from functional_optim.plan.guard import mask_of
from functional_optim.plan.leaf_inputs import flatten_inputs
from functional_optim.plan.list_layout import StepLayout
from functional_optim.plan.planned_runs import PreparedStep, step_inputs
from functional_optim.plan.planned_steps import PlannedSteps
from functional_optim.plan.shared_numbers import with_opened
from functional_optim.plan.step_counts import is_step_count
from functional_optim.plan.step_leaves import ListedLeaves, StepLeaves
from functional_optim.plan.tree import Given, Tree, TreeForm, check_in_place, planned_tree_of

PLANS = 32
"""Largest number of forms of trees for which plans are kept."""

_NOTHING = {type(None)}
_GRADIENTS = PLAIN | {type(None)}
_FIXED = {int, float, bool, str, type(None), *PLAIN}


class TreeSteps:
    """Plans of the steps of all trees of one form."""

    def __init__(
        self, optimizer: Chain, executor: Executor, tree: Tree, leaves: StepLeaves
    ) -> None:
        every = leaves.leaves
        self._places = [leaf.position for leaf in every]
        self.form = TreeForm(optimizer, tree, [id(leaf.chain) for leaf in every], self._places)
        """Form of the trees."""
        count = len(tree.tensors)
        self.steps = PlannedSteps(
            executor,
            self.form.numbers,
            places=self._places,
            more=range(self.form.end, count),
            may_begin=True,
        )
        """Planned steps of such trees."""
        self._layout = StepLayout((), range(count), tree.tensors)

    def is_for(self, tree: Tree) -> bool:
        """Return True if parameters and state have the layouts of the plans."""
        return self._layout.holds(tree.tensors, in_place=False)

    def prepare(
        self,
        optimizer: Chain,
        chains: list[LeafChain],
        tree: Tree,
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> PreparedStep | None:
        """Return a validated step, ready to run, in place or on copies; None if no plan fits."""
        links, tensors = optimizer.links, tree.tensors
        if extra:
            rows = self.steps.rows
            if not rows:
                return None
            every = ListedLeaves(rows, self._places, self.form.numbers, chains, tensors)
            extra = flatten_inputs(links, tree.spec, every, extra)
        given = step_inputs((links, chains, tensors, tree.grads, shared, measured, extra))
        return self.steps.prepare(given, in_place=in_place)

    def run_pure(self, prepared: PreparedStep, tree: Tree, shared: Any) -> tuple[Any, State]:
        """Run a pure step, and return parameters and state."""
        for run in prepared.runs:
            run()
        kept = map(self._places.__getitem__, prepared.kept)
        params, states = self.form.after(tree, prepared.tensors, kept)
        if isinstance(shared, Shared):
            shared = leaf_by_leaf.shared_after(shared, prepared.numbers, prepared.opened)
        return params, State(states, shared)


_PLANS: list[TreeSteps] = []
"""All plans, the latest first."""


def _plans_for(
    optimizer: Chain, tree: Tree | None
) -> Iterator[tuple[TreeSteps, Tree, list[LeafChain]]]:
    """Yield the plans with the form of a tree, and the chains. Layouts may still differ."""
    if tree is not None:
        for plan in tuple(_PLANS):  # another thread may add one
            chains = plan.form.chains(optimizer, tree)
            if chains is not None:
                yield plan, tree, chains


def update_(
    optimizer: Chain, given: Given, measured: Sequence[Tensor], extra: Mapping[str, Any]
) -> None:
    """Step a tree in place, by its plan or leaf by leaf: see :meth:`Optimizer.update_`."""
    if not step_(optimizer, given, measured, extra):
        defer_interrupts(_update_new, optimizer, given, measured, extra)


def _update_new(
    optimizer: Chain, given: Given, measured: Sequence[Tensor], extra: Mapping[str, Any]
) -> None:
    """Step a tree in place that has no plan, and plan later steps."""
    leaves, spec, _, read = leaf_by_leaf.step_leaves(optimizer, *given)
    stepped = read.stepped
    check_in_place(leaves, spec, stepped)
    check_not_captured(leaf.param for leaf in stepped)
    if plan(optimizer, given, read, in_place=True) and step_(optimizer, given, measured, extra):
        return
    found = read.copy_aliased_gradients()
    extra = flatten_inputs(optimizer.links, spec, found.leaves, extra)
    executor = found.executor(optimizer)
    shared = given[2].shared
    own = optimizer.links, executor, found, shared, measured, extra
    decide = partial(leaf_by_leaf.decide, *own)
    planned = _steps_for(optimizer, given, found, in_place=True)
    if planned is None:
        with torch.no_grad():
            decided = decide(None)
    else:
        with torch.no_grad():
            decided, step = planned[0].steps.decide(planned[1].tensors, found, decide)
        if step is not None:
            planned[0].steps.run(step, shared)
            return
    leaf_by_leaf.bind(executor, decided, shared)()


def step_(
    optimizer: Chain, given: Given, measured: Sequence[Tensor], extra: Mapping[str, Any]
) -> bool:
    """Step a tree in place by its plan; return False, with nothing changed, if no plan fits."""
    found = _listed(optimizer, given, in_place=True) if _PLANS else None
    for plan, tree, chains in _plans_for(optimizer, found):
        shared = given[2].shared
        step = plan.prepare(optimizer, chains, tree, shared, measured, extra, in_place=True)
        if step is not None:
            defer_interrupts(plan.steps.run, step, shared)
            return True
    return False


def step(
    optimizer: Chain, given: Given, measured: Sequence[Tensor], extra: Mapping[str, Any]
) -> tuple[Any, State] | None:
    """Return parameters and state after a pure step of a tree; None if no plan fits."""
    if not _PLANS or ((measured or extra) and not _are_fixed(measured, extra)):
        return None
    listed_tree = _listed(optimizer, given, in_place=False)
    for plan, tree, chains in _plans_for(optimizer, listed_tree):
        # A copy of a tensor with gaps has none, and torch may round it in another way.
        if not _have_plain_hypers(chains) or not plan.is_for(tree):
            continue
        shared = given[2].shared
        if isinstance(shared, Shared):
            shared = with_opened(optimizer.links, shared)
        with torch.no_grad():
            own = plan.prepare(optimizer, chains, tree, shared, measured, extra, in_place=False)
            if own is not None:
                return plan.run_pure(own, tree, shared)
    return None


def update(
    optimizer: Chain, given: Given, measured: Sequence[Tensor], extra: Mapping[str, Any]
) -> tuple[Any, State]:
    """Make a pure step of a tree that has no plan, and plan later steps.

    Arguments and result as for :meth:`Optimizer.update`.
    """
    params, grads, state = given
    if isinstance(state, State):
        state = state._replace(shared=with_opened(optimizer.links, state.shared))
        given = params, grads, state
    leaves, spec, states, read = leaf_by_leaf.step_leaves(optimizer, *given)
    check_not_captured(leaf.param for leaf in read.stepped)
    is_traced = torch.compiler.is_compiling()
    if not is_traced and plan(optimizer, given, read, in_place=False):
        made = step(optimizer, given, measured, extra)
        if made is not None:
            return made
    own = optimizer, spec, read, state.shared, measured, extra
    decide, found = partial(leaf_by_leaf.decide_pure, *own), None
    if not is_traced and _are_fixed(measured, extra) and _have_plain_hypers(read.chains):
        found = _steps_for(optimizer, given, read, in_place=False)
    if found is None:
        decided = decide(None)
    else:
        plans, tree = found
        with torch.no_grad():
            decided, prepared = plans.steps.decide(tree.tensors, read, decide, in_place=False)
            if prepared is not None:
                return plans.run_pure(prepared, tree, state.shared)
    leaf_by_leaf.run_pure(read.executor(optimizer), decided, leaves, states)
    made, kept = unflatten(spec, params, optimizer.namespace, leaves, states)
    shared = leaf_by_leaf.shared_after(state.shared, decided.shared, decided.opened)
    return made, State(kept, shared)


def plan(optimizer: Chain, given: Given, leaves: StepLeaves, *, in_place: bool) -> bool:
    """Plan a plain step before it runs; return False if the step is not plain.

    Args:
        in_place: False for a pure step.
    """
    if leaves.outline.plain is None:
        return False
    found = _steps_for(optimizer, given, leaves, in_place=in_place)
    if found is None:
        return False
    with torch.no_grad():
        return found[0].steps.plan(found[1].tensors, leaves)


def _steps_for(
    optimizer: Chain, given: Given, leaves: StepLeaves, *, in_place: bool
) -> tuple[TreeSteps, Tree] | None:
    """Return the TreeSteps of a tree, new or known; None if no plan may step the tree."""
    executor = leaves.executor(optimizer)
    tree = _listed(optimizer, given, in_place=in_place)
    if tree is None or not is_simple(tree.tensors) or not _is_planned(executor, leaves):
        return None
    with torch.no_grad():
        for found, *_ in _plans_for(optimizer, tree):
            if found.is_for(tree):
                return found, tree
        if not tree.has(leaves.params, [one.position for one in leaves.leaves]):
            return None
        made = TreeSteps(optimizer, executor, tree, leaves)
        if not made.is_for(tree):
            return None
    _PLANS.insert(0, made)
    del _PLANS[PLANS:]
    return made, tree


def _is_planned(executor: Executor, leaves: StepLeaves) -> bool:
    """Return True if kernels step some of the leaves, and all step counts are int64 on the CPU."""
    every = [one.stages for one in leaves.chains]
    if all(executor.in_chunks(k) is executor.in_whole_leaves(k) is None for k in every):
        return False
    pairs = zip(leaves.leaves, leaves.grads, strict=True)
    plain = leaves.outline.plain is not None
    return all(
        is_step_count(leaf.state.step) for leaf, grad in pairs if grad is not None or not plain
    )


def _listed(optimizer: Chain, given: Given, *, in_place: bool) -> Tree | None:
    """List parameters and state, with a gradient or None for each parameter that is not None.

    The result is None if no plan can step them.
    """
    if not isinstance(given[2], State):
        return None
    params, grads, state = given
    if not in_place and isinstance(state.shared, Shared):
        state = state._replace(shared=with_opened(optimizer.links, state.shared))
    tree = planned_tree_of(optimizer, (params, grads, state), in_place=in_place)
    if tree is None:
        return None
    mask = mask_of(tree.params)
    if mask is not None:
        strays = compress(tree.grads, map(not_, mask))  # gradients without a parameter
        if not _NOTHING.issuperset(map(type, strays)):
            return None
        tree = tree._replace(grads=list(compress(tree.grads, mask)))
    kinds = set(map(type, tree.grads))
    return None if kinds == _NOTHING or not kinds <= _GRADIENTS else tree


def _have_plain_hypers(chains: Sequence[LeafChain]) -> bool:
    """Return True if no derivative with respect to a hyper-parameter is needed."""
    return not torch.is_grad_enabled() or is_all_plain(list(map(HYPERS, chains)))


def _are_fixed(measured: Sequence[Tensor], extra: Mapping[str, Any]) -> bool:
    """Return True if no derivative with respect to these arguments is needed."""
    given: Any = [measured, list(extra.values())]
    every: list[Any] = optree.tree_leaves(given)
    if not torch.is_grad_enabled() or not every:
        return True
    if not _FIXED.issuperset(map(type, every)):
        return False
    return not any(one.requires_grad for one in every if isinstance(one, Tensor))
