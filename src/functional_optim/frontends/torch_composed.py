"""Groups of a torch.optim front-end for an optimizer whose leaves differ in their stages.

Each parameter group has one chain. Groups whose parameters differ in their stages, or in the
hyper-parameters that overrides give them, are divided; numbers that belong to no leaf are kept
here, and shown in every group.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from functional_optim.core.initial import none_made
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.links import Links
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState, Shared, state_tensors
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.composed_steps import GroupSteps
from functional_optim.frontends.group_parts import CheckParam, GroupPart, divided
from functional_optim.frontends.group_plans import HYPERS, GroupTensors
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.frontends.torch_inputs import of_parameters
from functional_optim.kernels import EXECUTORS, Executor, in_place
from functional_optim.optimizer import Optimizer
from functional_optim.plan.composed import one_step
from functional_optim.plan.composed.between_runs import BetweenRuns
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.shared_numbers import (
    as_tensor,
    initial_shared,
    shared_labels,
    with_common_hypers,
)
from functional_optim.plan.composed.step_leaves import StepLeaf, StepLeaves
from functional_optim.plan.composed.steps import MASKS

_PLACES = itemgetter(1)  # no frame for each step


class StateOf(Protocol):
    """Gives the state of a parameter of a group, by its name: see :func:`leaf_state`."""

    def __call__(
        self, group: Group, param: Tensor, name: str, *, begins: bool = True
    ) -> LeafState: ...


NO_STATE = LeafState(none_made(), ())
"""Of a parameter that is frozen."""

CALLS = "shared_step"
"""Under which a group of a checkpoint has the number of calls."""


class ComposedGroups:
    """The chains of a torch.optim front-end's groups, and the numbers that belong to no leaf.

    Args:
        optimizer: any, as a rule one that is composed or has overrides.
        check: refuses a parameter that the front-end cannot step.
    """

    def __init__(self, optimizer: Optimizer, check: CheckParam = check_takes_dtensor) -> None:
        self.optimizer, self._check = optimizer, check
        """The whole, and what refuses parameters of it."""
        self.parts: list[tuple[Optimizer, tuple[int, ...]]] = []
        """Of each parameter group, its own optimizer and the places of its links."""
        self.names: list[tuple[str, ...]] = []
        """Of each parameter group, those of its hyper-parameters."""
        self.unmet = UnmatchedSelectors(optimizer.links, optimizer.overrides)
        self.masks = MASKS
        """For how many sets of missing gradients steps are kept."""
        self.shared: Any = initial_shared(optimizer.links)
        self._keys = {
            _key(name, field): (place, at)
            for name, place in shared_labels(optimizer.links).items()
            for at, field in enumerate(self.shared.stages[place]._fields)
        }
        """Where the numbers stand in it, by the key that groups have for each."""
        self._opened = {
            f"{name}.shared_opened": place
            for name, place in shared_labels(optimizer.links).items()
            if optimizer.links[place].stage.gate is not None
        }
        """Of each gate, its place by the key under which groups say how often it has opened."""
        self._links: tuple[list[Any], Links] = [], optimizer.links
        self._count = 0
        self._planned: GroupSteps | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": None}

    def forget(self) -> None:
        """Let go of what is known of parameters and state."""
        self._planned = None

    def divided(self, group: Mapping[str, Any]) -> list[GroupPart]:
        """A group as groups that have one chain each, in the order of their first parameters.

        Raises:
            ValueError: a parameter on which no rule acts.
        """
        found = divided(self.optimizer, group, self._count, self.unmet, self._check)
        self._count += len(group["params"])
        return found

    def step(
        self,
        groups: Sequence[Group],
        states: Entries,
        state_of: StateOf,
        gradients: Callable[[list[Tensor]], list[Tensor | None]],
        extra: Mapping[str, Any],
        measured: Sequence[Tensor] = (),
        between: BetweenRuns | None = None,
    ) -> None:
        """Step all groups by a plan; without one, plan the next steps.

        Args:
            groups: as they are now.
            states: torch's dicts.
            state_of: gives the state of a parameter, which is written to.
            gradients: gives the gradients of parameters.
            extra: the inputs beside the gradients; those of parameters are mappings.
            measured: totals that are known.
            between: a call between the runs of the step.
        """
        every = groups
        if not all(map(_PLACES, self.parts)):
            groups = [group for group in groups if self.parts[group.number][1]]
        links = self.links(groups)
        known, held = self._known(groups, states)
        if known is not None:
            grads, chains = gradients(held.params), known.chains(groups)
            given = of_parameters(links, every, held.params, extra) if extra else extra
            tensors = held.tensors
            step = known.steps.prepared(links, chains, tensors, grads, self.shared, measured, given)
            if step is not None and between is not None:
                runs = between.ordered(step.runs, step.end.members, held.params)
                step = step._replace(runs=runs)
            if step is not None:
                defer_interrupts(known.steps.make, step, self.shared)
                return
        leaves = self.leaves(groups, state_of, gradients)
        extra = of_parameters(links, every, leaves.params, extra)
        executor = self._executor_for(leaves.params)
        with torch.no_grad():  # totals of parameters are plain numbers
            leaves = leaves.with_gradients_apart()
            decided = one_step.decide(links, executor, leaves, self.shared, measured, extra)
        one_step.update_(executor, decided, self.shared, between)
        known, held = self._known(groups, states)
        if known is None:
            own, masks = leaves.leaves, self.masks
            known = GroupSteps.of(groups, held, self.parts, executor, own, masks)
            self._planned = known
        if known is not None:
            known.learn(groups, held, leaves, decided)

    def _known(
        self, groups: Sequence[Group], states: Entries
    ) -> tuple[GroupSteps | None, GroupTensors]:
        """Return the plans for what groups hold, if there are any, and what they hold."""
        held, known = GroupTensors.of(groups, states), self._planned
        return (known if known is not None and known.holds(groups, held) else None), held

    def addends(
        self,
        groups: Sequence[Group],
        states: Entries,
        state_of: StateOf,
        gradients: Callable[[list[Tensor]], list[Tensor | None]],
        measured: Sequence[Tensor],
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return each parameter's addend to the next total, by identity, and the neutral addend.

        Args:
            groups, states, state_of, gradients, measured: as for :meth:`step`.
        """
        if not all(map(_PLACES, self.parts)):
            groups = [group for group in groups if self.parts[group.number][1]]
        links, found = self.links(groups), None
        known, held = self._known(groups, states)
        params: Sequence[Tensor] = held.params
        if known is not None:
            grads, tensors = gradients(held.params), held.tensors
            chains = known.chains(groups)
            found = known.steps.addends(links, chains, tensors, grads, self.shared, measured)
        if found is None:
            leaves = self.leaves(groups, state_of, gradients)
            params = leaves.params
            executor = self._executor_for(params)
            with torch.no_grad():
                decider = Decider(links, executor, leaves, self.shared, measured, {})
                found = decider.addends()
        return dict(zip(map(id, params), found[0], strict=True)), found[1]

    def _executor_for(self, params: Sequence[Tensor]) -> Executor:
        stages = [link.stage for link in self.optimizer.links]
        return EXECUTORS[in_place(self.optimizer.executor, params, stages)]

    def leaves(
        self,
        groups: Sequence[Group],
        state_of: StateOf,
        gradients: Callable[[list[Tensor]], list[Tensor | None]],
    ) -> StepLeaves:
        """The parameters of all groups but those that are frozen, each once, checked."""
        every: dict[int, tuple[Group, Tensor, str]] = {}
        for group in groups:
            for param, name in group.every() if self.parts[group.number][1] else ():
                every.setdefault(id(param), (group, param, name))
        grads = gradients([param for _, param, _ in every.values()])
        chains: dict[int, LeafChain] = {}
        leaves: list[StepLeaf] = []
        for (group, param, name), grad in zip(every.values(), grads, strict=True):
            own, places = self.parts[group.number]
            chain = chains.setdefault(group.number, LeafChain(places, own.stages, group.hypers))
            state = state_of(group, param, name, begins=grad is not None)
            leaf = StepLeaf(len(leaves), param, state, chain, name)
            leaves.append(one_step.checked_leaf(leaf, grad))
        everywhere = [self.parts[group.number][1] for group in groups]
        return StepLeaves.of(self.links(groups), leaves, grads, everywhere)

    def links(self, groups: Sequence[Group]) -> Links:
        """All links with the hyper-parameters of now: of the first group that has each.

        Raises:
            ValueError: groups differ in one that numbers for all parameters depend on.
        """
        hypers = list(map(HYPERS, groups))
        if len(hypers) != len(self._links[0]) or not all(map(is_, hypers, self._links[0])):
            links = list(self.optimizer.links)
            for group in reversed(groups):
                for place, hyper in zip(self.parts[group.number][1], group.hypers, strict=True):
                    links[place] = links[place]._replace(hyper=hyper)
            links = list(with_common_hypers(tuple(links), self._chains_of(groups)))
            if isinstance(self.shared, Shared) and not int(self.shared.step):
                begun = state_tensors(initial_shared(tuple(links)).stages)  # by the options of now
                for before, now in zip(state_tensors(self.shared.stages), begun, strict=True):
                    before.copy_(now)
            self._links = hypers, tuple(links)
        return self._links[1]

    def require_common(
        self, groups: Sequence[Group], more: Sequence[tuple[Optimizer, tuple[int, ...], Links]]
    ) -> None:
        """Make sure that groups which are to be added agree in what shared numbers depend on.

        Args:
            groups: that there are.
            more: of each that is to be added its optimizer, the places of its links, and these
                with the options of the group.

        Raises:
            ValueError: they do not.
        """
        chains = [LeafChain(k, own.stages, tuple(one.hyper for one in h)) for own, k, h in more]
        with_common_hypers(self.optimizer.links, [*self._chains_of(groups), *chains])

    def _chains_of(self, groups: Sequence[Group]) -> list[LeafChain]:
        parts = [(self.parts[group.number], group.hypers) for group in groups]
        return [LeafChain(places, own.stages, hypers) for (own, places), hypers in parts]

    @property
    def keeps_numbers(self) -> bool:
        """Return True if anything belongs to no leaf."""
        return isinstance(self.shared, Shared)

    def numbers(self) -> dict[str, Any]:
        """Numbers that belong to no leaf, as the groups of a checkpoint have them."""
        if not isinstance(self.shared, Shared):
            return {}
        found: dict[str, Any] = {CALLS: int(self.shared.step)}
        for key, (place, at) in self._keys.items():
            found[key] = float(self.shared.stages[place][at])
        for key, place in self._opened.items():
            found[key] = int(self.shared.opened[place])
        return found

    def show(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write what belongs to no leaf into parameter groups, where every checkpoint finds it."""
        numbers = self.numbers()
        for group in groups if numbers else ():
            group.update(numbers)

    def check_numbers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make sure that the groups of a checkpoint have what belongs to no leaf.

        Raises:
            ValueError: some of it is missing, or groups differ.
        """
        wanted = self.numbers()
        found = [{key: group[key] for key in wanted if key in group} for group in groups]
        if not wanted:
            return
        # Earlier versions did not write how often gates have opened.
        missing = sorted(wanted.keys() - found[0].keys() - self._opened.keys())
        if missing or any(one != found[0] for one in found):
            what = f"it has no {', '.join(missing)}" if missing else "its groups differ in that"
            raise ValueError(
                f"this checkpoint does not say what {self.optimizer} keeps for all parameters: "
                f"{what}"
            )

    def take_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over what belongs to no leaf from the groups of a checkpoint that was loaded.

        Raises:
            ValueError: as of :meth:`check_numbers`; nothing is taken over then.
        """
        self.check_numbers(groups)
        if not isinstance(self.shared, Shared):
            return
        with torch.no_grad():
            self.shared.step.fill_(groups[0][CALLS])
            for key, (place, at) in self._keys.items():
                self.shared.stages[place][at].copy_(as_tensor(groups[0][key]))
            for key, place in self._opened.items():
                # There schedules went by the calls, and go on from these.
                self.shared.opened[place].fill_(groups[0].get(key, groups[0][CALLS]))
        self.show(groups)


def _key(name: str, field: str) -> str:
    """Under which a group has a shared number: never the name of a hyper-parameter."""
    return f"{name}.shared.{field}"


def viewed_params(
    groups: Sequence[Group],
    optimizer_of: Callable[[int], Optimizer],
    state_of: Callable[[Group, Tensor, str], LeafState],
) -> list[Tensor]:
    """The parameters to evaluate with, group by group.

    Args:
        groups: as they are now.
        optimizer_of: gives the chain of the group of a number.
        state_of: gives the state of a parameter.
    """
    seen: list[Tensor] = []
    with torch.no_grad():
        for group in groups:
            stages = optimizer_of(group.number).stages
            chain = LeafChain((), stages, group.hypers)
            for param, name in group.every():
                state = state_of(group, param, name) if stages else NO_STATE
                leaf = StepLeaf(len(seen), param.detach(), state, chain, name)
                seen.append(one_step.viewed(leaf))
    return seen
