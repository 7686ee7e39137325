"""GroupSteps: steps of parameter groups with one chain each, by plans where a plan fits."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad, check_param, check_writable
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.leaf import layouts_of
from functional_optim.core.links import Links
from functional_optim.core.named_tuples import from_fields
from functional_optim.core.overrides import HYPERS, LeafChain
from functional_optim.core.state import LeafState, Shared
from functional_optim.core.state_init import zero_count
from functional_optim.frontends.group_tensors import (
    Entries,
    Gradients,
    Group,
    GroupForm,
    GroupTensors,
    StatesOf,
)
from functional_optim.kernels import EXECUTORS, Executor, in_place
from functional_optim.plan import leaf_by_leaf
from functional_optim.plan.decision import Decision
from functional_optim.plan.leaf_by_leaf import BetweenRuns
from functional_optim.plan.planned_runs import PreparedStep, step_inputs
from functional_optim.plan.planned_steps import MASKS, PlannedSteps
from functional_optim.plan.points import does_wait
from functional_optim.plan.step_counts import waits_for_first_step
from functional_optim.plan.step_leaves import StepLeaf, StepLeaves

FORMS = 4
"""Number of forms of groups for which plans are kept. Options may be switched off and on again."""

NO_STATE = LeafState(zero_count(), ())
"""State of a parameter that is frozen or not stepped."""

Extra = Callable[[Sequence[Tensor]], Any]
"""Function of parameters that returns the inputs besides gradients, with lists as inputs per leaf.
"""


class CurrentGroups(NamedTuple):
    """Parameter groups in one step."""

    groups: Sequence[Group]
    """The groups, without frozen groups."""
    chains: Sequence[LeafChain]
    """The chain of each group: the same object as long as hyper-parameters are the same."""
    links: Links
    """Links of the optimizer, with the current hyper-parameters."""
    shared: Any
    """The shared scalars, which the step writes to."""
    states: Entries
    """torch's dicts of state."""
    states_of: StatesOf
    """Returns the states of parameters, which the step writes to."""
    gradients: Gradients


current_groups = from_fields(CurrentGroups)


class _Planned(NamedTuple):
    """Planned steps of groups of one form."""

    form: GroupForm
    steps: PlannedSteps


class GroupSteps:
    """Steps of parameter groups, with their plans.

    Args:
        executor: the name of the optimizer's executor.
        masks: number of sets of missing gradients for which plans are kept.
    """

    def __init__(self, executor: str, *, masks: int = MASKS) -> None:
        self._executor, self._masks = executor, masks
        self._planned: list[_Planned] = []  # the latest first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": []}

    def forget(self) -> None:
        """Delete all plans."""
        self._planned = []

    def step(
        self,
        now: CurrentGroups,
        measured: Sequence[Tensor] = (),
        extra: Extra | None = None,
        between: BetweenRuns | None = None,
    ) -> None:
        """Run a step, with interrupts deferred."""
        defer_interrupts(self.prepare(now, measured, extra, between))

    def prepare(
        self,
        now: CurrentGroups,
        measured: Sequence[Tensor] = (),
        extra: Extra | None = None,
        between: BetweenRuns | None = None,
    ) -> Callable[[], object]:
        """Return the function that runs a step; arguments and errors as for :meth:`step`."""
        found, held = self._known(now)
        call = None if found is None else self._bound(found, held, now, measured, extra, between)
        if call is not None:
            return call
        leaves = self._leaves(now)
        check_not_captured(leaves.params)
        executor = self._executor_for(leaves.params, now.links)
        known, held = self._planned_for(now, executor)  # state entries may be new
        if len(leaves.leaves) == len(held.params) and known.steps.plan(held.tensors, leaves):
            call = self._bound(known, held, now, measured, extra, between, begins=True)
        if call is not None:
            return call
        given = {} if extra is None else extra(leaves.params)
        with torch.no_grad():  # totals need no derivative
            leaves = leaves.copy_aliased_gradients()
            own = now.links, executor, leaves, now.shared, measured, given
            decide = partial(leaf_by_leaf.decide, *own)
            if len(leaves.leaves) == len(held.params):
                decided, step = known.steps.decide(held.tensors, leaves, decide)
            else:
                decided, step = decide(None), None
        if step is None:
            return leaf_by_leaf.bind(executor, decided, now.shared, between)
        return _call(known.steps, step, held.params, now.shared, between)

    def _bound(
        self,
        known: _Planned,
        held: GroupTensors,
        now: CurrentGroups,
        measured: Sequence[Tensor],
        extra: Extra | None,
        between: BetweenRuns | None,
        *,
        begins: bool = False,
    ) -> Callable[[], object] | None:
        """Bind a step by plans; None if no plan fits.

        ``begins`` is True if the state of leaves before their first step was created for this step.
        """
        params, steps = held.params, known.steps
        more = {} if extra is None else extra(params)
        grads, tensors = now.gradients(params), [*params, *held.values]
        given = step_inputs((now.links, now.chains, tensors, grads, now.shared, measured, more))
        step = steps.prepare(given, begins=begins)
        if step is None:
            return None
        if between is None:
            is_single = len(step.runs) == 1 and not step.numbers
            return step.runs[0] if is_single else partial(steps.run, step, now.shared)
        return _call(steps, step, params, now.shared, between)

    def addends(
        self, now: CurrentGroups, measured: Sequence[Tensor]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return each parameter's addend to the next total, by ``id``, and a zero addend."""
        known, held = self._known(now)
        params: Sequence[Tensor] = held.params
        found = None
        if known is not None:
            grads = now.gradients(held.params)
            own = now.links, now.chains, held.tensors, grads, now.shared
            found = known.steps.addends(step_inputs((*own, measured, {})))
        if found is None:
            leaves = self._leaves(now)
            params = leaves.params
            executor = self._executor_for(params, now.links)
            with torch.no_grad():
                decider = Decision(now.links, executor, leaves, now.shared, measured, {})
                found = decider.addends()
        return dict(zip(map(id, params), found[0], strict=True)), found[1]

    def _known(self, now: CurrentGroups) -> tuple[_Planned | None, GroupTensors]:
        """Return the plans of groups, or None if there are none, and the tensors of the groups."""
        held, hypers = GroupTensors.of(now.groups, now.states), list(map(HYPERS, now.groups))
        for known in self._planned:  # as a rule one
            if known.form.holds(held, hypers):
                return known, held
        return None, held

    def _executor_for(self, params: Sequence[Tensor], links: Links) -> Executor:
        stages = [link.stage for link in links]
        return EXECUTORS[in_place(self._executor, params, stages)]

    def _leaves(self, now: CurrentGroups) -> StepLeaves:
        """Return the checked parameters of all groups, each once."""
        every = _params_by_id(now.groups)
        numbers, params = [one for one, *_ in every.values()], [one for _, one, _ in every.values()]
        names, grads = [name for *_, name in every.values()], now.gradients(params)
        links, chains, shares = now.links, now.chains, isinstance(now.shared, Shared)
        asks_all = does_wait([k.stage for k in links], [k.places for k in chains], shares=shares)
        # The state of other parameters is ignored.
        asked = [k for k, grad in enumerate(grads) if asks_all or grad is not None]
        _check_each([(params[k], grads[k], names[k]) for k in asked])
        states = [NO_STATE] * len(params)
        for number, group in enumerate(now.groups):
            own = [k for k in asked if numbers[k] == number]
            columns = [params[k] for k in own], [names[k] for k in own]
            found = now.states_of(group, *columns, [grads[k] is not None for k in own])
            for k, state in zip(own, found, strict=True):
                states[k] = state
                if grads[k] is None and waits_for_first_step(state):
                    states[k] = now.states_of(group, [params[k]], [names[k]], [True])[0]
        every_leaf = zip(count(), params, states, [chains[k] for k in numbers], names)
        leaves = list(map(_step_leaf, every_leaf))
        return StepLeaves.of(links, leaves, grads, shares=shares, groups=numbers, chains=chains)

    def _planned_for(self, now: CurrentGroups, executor: Executor) -> tuple[_Planned, GroupTensors]:
        """Return the plans of groups, new or known, and the tensors of the groups."""
        known, held = self._known(now)
        if known is None:
            numbers = [place for place, one in enumerate(now.groups) for _ in one.params]
            steps = PlannedSteps(executor, numbers, masks=self._masks, owns_shared=True)
            known = _Planned(GroupForm(now.groups, now.chains, held), steps)
            self._planned = [known, *self._planned[: FORMS - 1]]
        return known, held


_step_leaf = from_fields(StepLeaf)


def _params_by_id(groups: Sequence[Group]) -> dict[int, tuple[int, Tensor, str]]:
    """Return each parameter once, with the index of its group and its name."""
    every: dict[int, tuple[int, Tensor, str]] = {}
    for number, group in enumerate(groups):
        for param, name in zip(group.params, group.labels(), strict=True):
            first, _, known = every.setdefault(id(param), (number, param, name))
            if first != number:
                raise ValueError(
                    f"{name!r} in param_groups[{group.number}] is the same parameter as {known!r} "
                    f"in param_groups[{groups[first].number}]; a parameter is stepped once, by the "
                    "options of one group, so remove it from the other group"
                )
    return every


def _check_each(leaves: Sequence[tuple[Tensor, Tensor | None, str]]) -> None:
    """Check parameters and gradients, each given with its name: one of all with equal layouts."""
    params, grads = [one for one, *_ in leaves], [one for _, one, _ in leaves]
    pairs = list(zip(layouts_of(params), layouts_of(grads), strict=True))
    kinds = dict(zip(reversed(pairs), reversed(leaves), strict=True))
    for param, grad, name in reversed(kinds.values()):
        check_param(param, name)
        if param.is_conj() or param.is_neg():
            check_writable({name: param})
        if grad is not None:
            check_grad(param, grad, name)


def _call(
    steps: PlannedSteps,
    step: PreparedStep,
    params: Sequence[Tensor],
    shared: Any,
    between: BetweenRuns | None,
) -> Callable[[], object]:
    """Return the function that runs a bound step."""
    if between is not None:
        runs = between.ordered(step.runs, step.end.members, params)
        step = step._replace(runs=runs)
    return partial(steps.run, step, shared)
