"""Steps without a plan, leaf by leaf.

Everything is checked, decided (see :mod:`functional_optim.plan.decision`) and bound before anything
is written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.checks import (
    check_grad,
    check_leaf_state,
    check_measured,
    check_param,
    detach_states,
)
from functional_optim.core.derivatives import require_differentiable
from functional_optim.core.format import format_value
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.hyper import resolve
from functional_optim.core.links import Links
from functional_optim.core.on_global_step import at_global_step
from functional_optim.core.overrides import chains_of, paths_of
from functional_optim.core.state import (
    GateCounts,
    LeafState,
    Shared,
    State,
    map_state,
    state_tensors,
)
from functional_optim.core.state_init import FieldsOf, TreeFields, fields_of
from functional_optim.core.tree import flatten, flatten_like, leaf_states, path_name
from functional_optim.kernels import Executor
from functional_optim.numeric import larger
from functional_optim.plan import item_steps
from functional_optim.plan.decision import Decision, Rows
from functional_optim.plan.item import next_step
from functional_optim.plan.leaf_inputs import copy_inputs, flatten_inputs, remove_inputs
from functional_optim.plan.points import StageRun, does_wait
from functional_optim.plan.shared_numbers import as_tensor, check_shared
from functional_optim.plan.step_leaves import StepLeaf, StepLeaves


class BetweenRuns(NamedTuple):
    """Call after the runs of some leaves, and before the runs of all other leaves.

    Runs are of different leaves, so their order changes no result.
    """

    is_first: Callable[[Tensor], bool]
    """Return True for a parameter whose run comes before the call."""
    call: Callable[[], object]

    def ordered(
        self,
        runs: Sequence[Callable[[], object]],
        members: Sequence[Sequence[int]],
        params: Sequence[Tensor],
    ) -> list[Callable[[], object]]:
        """Return all runs and the call, in order."""
        first = [any(self.is_first(params[k]) for k in own) for own in members]
        return [*compress(runs, first), self.call, *compress(runs, map(not_, first))]


def check_extra(links: Links, extra: Mapping[str, Any]) -> None:
    """Raise TypeError if no stage takes an input. Missing inputs are found when a stage runs."""
    wanted = [name for link in links for name in link.stage.extra]
    wanted += [one.name for link in links for one in link.stage.inputs]
    for name in extra:
        if name not in wanted:
            there = ", ".join(map(repr, dict.fromkeys(wanted))) or "none"
            raise TypeError(f"no stage takes the input {name!r}; inputs of this chain: {there}")


def step_leaves(
    optimizer: Chain, params: Any, grads: Any, state: Any
) -> tuple[list[Any], optree.PyTreeSpec, list[Any], StepLeaves]:
    """Flatten and check the arguments of a step: (params, spec, leaf states, leaves)."""
    leaves, spec = flatten(params, optimizer.namespace)
    grad_leaves = flatten_like(spec, grads, "gradients")
    states = leaf_states(spec, state)
    check_shared(optimizer, state.shared)
    chains = chains_of(optimizer.links, optimizer.overrides, spec, leaves)
    shares = isinstance(state.shared, Shared)
    places = [chain.places for chain, leaf in zip(chains, leaves, strict=True) if leaf is not None]
    asks_all = does_wait(optimizer.stages, places, shares=shares)
    found: list[StepLeaf] = []
    given = []
    fields = TreeFields()
    for i, path in enumerate(paths_of(spec)):
        param, grad, name = leaves[i], grad_leaves[i], path_name(path)
        if param is None:
            if grad is not None:
                raise ValueError(
                    f"there is a gradient at {name!r}, but the parameter is None; pass None there"
                )
            continue
        leaf = StepLeaf(i, param, states[i], chains[i], name)
        if asks_all or grad is not None:  # the state of other parameters is ignored
            check_leaf(leaf, grad, fields.of(leaf.chain))
        found.append(leaf)
        given.append(grad)
    return leaves, spec, states, StepLeaves.of(optimizer.links, found, given, shares=shares)


def check_leaf(leaf: StepLeaf, grad: Any, fields: FieldsOf = fields_of) -> None:
    """Raise TypeError or ValueError if a parameter, its gradient or its state does not fit."""
    check_param(leaf.param, leaf.name)
    if grad is not None:
        check_grad(leaf.param, grad, leaf.name)
    chain = leaf.chain
    check_leaf_state(chain.stages, chain.hypers, leaf.param, leaf.state, leaf.name, fields)
    wanted = sum(stage.gate is not None for stage in chain.stages)
    if len(leaf.state.gates) != wanted:
        raise ValueError(
            f"the state at {leaf.name!r} counts at {len(leaf.state.gates)} gates, and this "
            f"optimizer has {wanted} for it: it is of another optimizer; use init(params)"
        )


def states_by_name(
    optimizer: Chain, params: Mapping[str, Tensor], state: State
) -> dict[str, LeafState]:
    """Return the state of each parameter."""
    names, spec = flatten({name: name for name in params}, "")
    states = dict(zip(names, leaf_states(spec, state), strict=True))
    check_shared(optimizer, state.shared)
    chains = zip(names, optimizer.chains_for(params), strict=True)
    for k, (name, chain) in enumerate(chains):
        check_leaf(StepLeaf(k, params[name], states[name], chain, name), None)
    return states


def decide(
    links: Links,
    executor: Executor,
    leaves: StepLeaves,
    shared: Any,
    measured: Sequence[Tensor],
    extra: Mapping[str, Any],
    rows: Rows | None = None,
) -> Decision:
    """Decide a step; arguments as for :class:`Decision`."""
    if measured:
        check_measured([link.stage for link in links], measured)
    if extra:
        check_extra(links, extra)
    check_not_captured(leaves.params)
    return Decision(links, executor, leaves, shared, measured, extra, rows).decide()


def decide_pure(
    optimizer: Chain,
    spec: optree.PyTreeSpec,
    leaves: StepLeaves,
    shared: Any,
    measured: Sequence[Tensor],
    extra: Mapping[str, Any],
    rows: Rows | None = None,
) -> Decision:
    """Decide a pure step; arguments as for :func:`decide`."""
    if any([not stage.differentiable for stage in optimizer.stages]):  # noqa: C419  is traced
        numbers = [*measured, *state_tensors(getattr(shared, "stages", ()))]
        for leaf, grad in zip(leaves.leaves, leaves.grads, strict=True):
            if grad is not None:
                own, given = leaf.chain, [grad, *state_tensors(leaf.state.stages), *numbers]
                named = own.stages, leaf.name, leaf.param
                require_differentiable(*named, given, own.hypers, extra.values())
    executor = leaves.executor(optimizer)
    extra = flatten_inputs(optimizer.links, spec, leaves.leaves, extra)
    return decide(optimizer.links, executor, leaves, shared, measured, extra, rows)


def run_pure(executor: Executor, decided: Decision, params: list[Any], states: list[Any]) -> None:
    """Run a decided step, and put its results into lists of all parameters and leaf states."""
    for run in decided.end.runs:
        items, measured = decided.items(run.part), decided.totals_of(run.part)
        scalars_of = partial(decided.numbers.scalars_of, run.part)
        results = item_steps.update(run.part.stages, executor, items, measured, scalars_of)
        for k, (param, part) in zip(run.part.members, results, strict=True):
            leaf = decided.leaves[k]
            params[leaf.position] = param
            states[leaf.position] = _after(run, leaf.state, part)


def _after(run: StageRun, before: LeafState, part: LeafState) -> LeafState:
    """Return the state of a leaf after a run of some stages, in new memory."""
    made = remove_inputs(run.part.stages, part.stages)
    own = dict(zip(run.part.at, made, strict=True))
    every = enumerate(before.stages)
    stages = tuple([own[k] if k in own else _copied(state) for k, state in every])
    gates = [GateCounts(*map(torch.clone, one)) for one in before.gates]
    for k, passed, counted in run.gates:
        runs, held = gates[k]
        gates[k] = GateCounts(runs + int(counted), torch.zeros_like(held) if passed else held + 1)
    step = part.step if run.is_step else before.step.clone()
    return LeafState(step, stages, tuple(gates))


def _copied(state: Any) -> Any:
    return map_state(torch.clone, state)


def shared_after(shared: Any, numbers: Sequence[Any], opened: Collection[int]) -> Any:
    """Return the shared scalars after a pure step, as new tensors.

    ``numbers`` has the shared scalars of every link after the step, ``opened`` the indices of the
    gates that opened.
    """
    if not isinstance(shared, Shared):
        return shared
    stages = tuple(type(one)(*map(as_tensor, one)) if one else () for one in numbers)
    counts = [
        one + int(place in opened) if isinstance(one, Tensor) else one
        for place, one in enumerate(shared.opened)
    ]
    return Shared(shared.step + 1, stages, tuple(counts))


def bind(
    executor: Executor, decided: Decision, shared: Any, between: BetweenRuns | None = None
) -> Callable[[], None]:
    """Bind a step in place, and return the function that runs it."""
    runs = [prepare(executor, decided, run) for run in decided.end.runs]
    if between is not None:
        params = [leaf.param for leaf in decided.leaves]
        runs = between.ordered(runs, decided.end.members, params)
    return partial(_run_and_detach, runs, decided, shared)


def _run_and_detach(runs: Sequence[Callable[[], object]], decided: Decision, shared: Any) -> None:
    run_all(runs, decided.shared, decided.opened, shared)
    detach_states(leaf.state for leaf in decided.stepped)


def prepare(executor: Executor, decided: Decision, run: StageRun) -> Callable[[], object]:
    """Bind a run, leaf by leaf, with its counts. All errors are raised now."""
    stages = run.part.stages
    items = copy_inputs(stages, decided.items(run.part))
    step = item_steps.prepare(
        stages,
        executor,
        items,
        decided.totals_of(run.part),
        partial(decided.numbers.scalars_of, run.part),
        counts=run.is_step,
    )
    return partial(_run_and_count, step, run, [decided.leaves[k].state for k in run.part.members])


def _run_and_count(step: Callable[[], None], run: StageRun, states: Sequence[LeafState]) -> None:
    step()
    for state in states:
        for k, passed, counted in run.gates:
            runs, held = state.gates[k]
            runs.add_(int(counted))
            held.add_(1)
            if passed:
                held.zero_()


def run_all(
    steps: Sequence[Callable[[], object]],
    numbers: Sequence[Any],
    opened: Sequence[int],
    shared: Any,
) -> None:
    """Run a validated step."""
    for step in steps:
        step()
    if isinstance(shared, Shared):
        shared.step.add_(1)
        for place in opened:
            shared.opened[place].add_(1)
        for before, after in zip(shared.stages, numbers, strict=True):
            for tensor, value in zip(before, after, strict=True):
                if isinstance(value, float):
                    tensor.fill_(value)
                else:
                    tensor.copy_(as_tensor(value))


def view(optimizer: Chain, params: Any, state: State) -> Any:
    """Implement :meth:`Optimizer.view`."""
    leaves, spec = flatten(params, optimizer.namespace)
    states = leaf_states(spec, state)
    chains = chains_of(optimizer.links, optimizer.overrides, spec, leaves)
    views = list(leaves)
    for i, (chain, path) in enumerate(zip(chains, paths_of(spec), strict=True)):
        if leaves[i] is None:
            continue
        name = path_name(path)
        check_leaf_state(chain.stages, chain.hypers, leaves[i], states[i], name)
        views[i] = view_leaf(StepLeaf(i, leaves[i], states[i], chain, name))
    return spec.unflatten(views)


def view_leaf(leaf: StepLeaf) -> Tensor:
    """Return the parameter to evaluate with: the view of the last stage that has one."""
    param, chain = leaf.param, leaf.chain
    parts = zip(chain.stages, chain.hypers, leaf.state.stages, strict=True)
    for stage, hyper, own in reversed(list(parts)):
        if stage.view is None:
            continue
        at = larger(1.0, next_step(leaf.state.step, param.device) - 1.0)
        counted = at_global_step(hyper, at)
        now = resolve(stage.name, stage.bounds, stage.check, counted, at)
        seen = stage.view(param, own, now)
        if not isinstance(seen, Tensor) or seen.shape != param.shape:
            raise TypeError(
                f"{stage.name}: view must return a tensor of the parameter's shape, it "
                f"returned {format_value(seen)} for {leaf.name!r}"
            )
        return seen
    return param
