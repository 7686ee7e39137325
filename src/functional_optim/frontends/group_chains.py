"""GroupChains: the chain of each parameter group of a torch.optim front-end.

A group is divided if its parameters differ in their stages, or in the hyper-parameters of an
override. Shared scalars are stored here, and every parameter group shows them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.links import Links
from functional_optim.core.local_shards import check_takes_dtensor
from functional_optim.core.overrides import HYPERS, LeafChain
from functional_optim.core.state import Shared, state_tensors
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.group_options import OptionsReader
from functional_optim.frontends.group_parts import CheckParam, GroupPart, divide_group, needs_groups
from functional_optim.frontends.group_steps import NO_STATE, CurrentGroups, current_groups
from functional_optim.frontends.group_tensors import Entries, Gradients, Group, StatesOf
from functional_optim.frontends.recipe import OptimizerRecipe, Recipe
from functional_optim.kernels import in_place, needs_total
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.explain import chain_lines, waiting_lines
from functional_optim.plan import leaf_by_leaf
from functional_optim.plan.guard import grads_of
from functional_optim.plan.shared_numbers import (
    as_tensor,
    initial_shared,
    shared_labels,
    with_common_hypers,
)
from functional_optim.plan.step_counts import is_step_count
from functional_optim.plan.step_leaves import StepLeaf

_PLACES = itemgetter(1)  # implemented in C, so that a step makes no Python call per group

CALLS = "shared_step"
"""Key of the number of calls in the groups of a checkpoint."""


class ChainPart(NamedTuple):
    """Chain of a parameter group."""

    optimizer: Optimizer
    places: tuple[int, ...]
    """The indices of its links among all links."""
    reader: OptionsReader | None = None
    """The reader of the group's options; None after unpickling."""


class GroupChains:
    """Chains of the groups of a torch.optim front-end, and the shared scalars.

    Args:
        recipe: of the optimizer of all groups.
        check: raises an error for a parameter that the front-end cannot step.
        divides: True to divide groups by chain; None to divide them if the optimizer needs it.
    """

    def __init__(
        self,
        recipe: Recipe,
        check: CheckParam = check_takes_dtensor,
        *,
        divides: bool | None = None,
    ) -> None:
        optimizer = recipe.optimizer
        self.recipe, self.optimizer, self._check = recipe, optimizer, check
        """The recipe and the optimizer of all groups, and the check of its parameters."""
        self.divides = needs_groups(optimizer) if divides is None else divides
        """True if groups are divided by chain."""
        self.parts: list[ChainPart] = []
        """The chain of each parameter group."""
        self._places = {optimizer.stages: tuple(range(len(optimizer.links)))}
        """The indices of links, by the stages of groups with the options of a class."""
        self.selectors = UnmatchedSelectors(optimizer.links, optimizer.overrides)
        self.shared: Any = initial_shared(optimizer)
        self.has_shared = isinstance(self.shared, Shared)
        """True if the optimizer has shared scalars."""
        self._keys = {
            f"{name}.shared.{field}": (place, at)
            for name, place in shared_labels(optimizer.links).items()
            for at, field in enumerate(self.shared.stages[place]._fields)
        }
        """For each key of a shared scalar in a group, the link and the field of the scalar. No
        hyper-parameter has such a name."""
        self._opened = {
            f"{name}.shared_opened": place
            for name, place in shared_labels(optimizer.links).items()
            if optimizer.links[place].stage.gate is not None
        }
        """For each key of the number of times that a gate opened, the index of the gate."""
        self._links, self._chains = optimizer.links, list[LeafChain]()
        """Links with the hyper-parameters of the last step, and the chain of each group."""
        self._combines = any(link.stage.combine is not None for link in optimizer.links)

    def __getstate__(self) -> dict[str, Any]:
        parts = [one._replace(reader=None) for one in self.parts]
        return {**self.__dict__, "_chains": [], "parts": parts}

    def add(self, params: Any, part: GroupPart | None = None) -> None:
        """Add the chain of a group with these parameters: by default, the whole optimizer."""
        whole = self.recipe.optimizer
        every = tuple(range(len(whole.links)))
        own = (whole, every) if part is None else (part.optimizer, part.places)
        self.parts.append(ChainPart(*own))
        self.reader(len(self.parts) - 1, [params] if isinstance(params, Tensor) else params)

    def recipe_of(self, number: int) -> Recipe:
        """Return the recipe of a group."""
        return OptimizerRecipe(self.parts[number].optimizer) if self.divides else self.recipe

    def reader(self, number: int, params: Iterable[Any] = ()) -> OptionsReader:
        """Return the reader of a group's options; ``params`` are those of the group."""
        part = self.parts[number]
        found = part.reader or self.recipe_of(number).reader(list(params), number)
        if part.reader is None:
            self.parts[number] = part._replace(reader=found)
        return found

    def replace_parts(self, changed: Mapping[int, Optimizer]) -> None:
        """Replace the chains of groups, by number, whose options have changed their stages."""
        every = [changed.get(number, one.optimizer) for number, one in enumerate(self.parts)]
        if not all(own.stages in self._places for own in changed.values()):
            distinct = {own.stages: own.links for own in every}
            stages = [stage for own in distinct for stage in own]
            if len(distinct) > 1 and any(map(needs_total, stages)):
                raise ValueError(
                    f"the options of parameter group {next(iter(changed))} need other stages than "
                    "those of other groups, and a stage needs a total over the gradients of all "
                    "groups; put the option back, or give all groups the same value"
                )
            links: Links = ()
            self._places = {}
            for own, added in distinct.items():
                self._places[own] = tuple(range(len(links), len(links) + len(added)))
                links = (*links, *added)
            self.optimizer = replace(self.optimizer, links=links)
            self._links = links
        self.parts[:] = [
            ChainPart(own, self._places[own.stages], one.reader)
            for own, one in zip(every, self.parts, strict=True)
        ]
        self._chains = []

    def divide(self, group: Mapping[str, Any], first: int) -> list[GroupPart]:
        """Divide a group into groups with one chain each: see :func:`divide_group`."""
        return divide_group(self.optimizer, group, first, self.selectors, self._check)

    def current_groups(
        self,
        groups: Sequence[Group],
        states: Entries,
        states_of: StatesOf,
        gradients: Gradients = grads_of,
    ) -> CurrentGroups:
        """Return the groups of a step, without frozen groups."""
        if not all(map(_PLACES, self.parts)):
            groups = [group for group in groups if self.parts[group.number].places]
        own: list[Any] = list(map(HYPERS, groups))
        known = self._chains
        if len(own) != len(known) or not all(map(is_, own, map(HYPERS, known))):
            if self._combines:
                self._links = self._links_of(groups)
            self._chains = self._chains_of(groups)
        chains, links = self._chains, self._links
        shared = self.shared
        return current_groups((groups, chains, links, shared, states, states_of, gradients))

    def _links_of(self, groups: Sequence[Group]) -> Links:
        """Return all links, with the current hyper-parameters of those that have shared scalars."""
        links = with_common_hypers(self.optimizer.links, self._chains_of(groups))
        if isinstance(self.shared, Shared) and not int(self.shared.step):
            # Before the first call, the shared scalars are those of the current options.
            initial = state_tensors(initial_shared(replace(self.optimizer, links=links)).stages)
            for before, now in zip(state_tensors(self.shared.stages), initial, strict=True):
                before.copy_(now)
        return links

    def check_common_options(
        self, groups: Sequence[Group], more: Sequence[tuple[GroupPart, tuple[Any, ...]]]
    ) -> None:
        """Raise ValueError if groups differ in an option that shared scalars depend on."""
        chains = [LeafChain(one.places, one.optimizer.stages, hypers) for one, hypers in more]
        with_common_hypers(self.optimizer.links, [*self._chains_of(groups), *chains])

    def _chains_of(self, groups: Sequence[Group]) -> list[LeafChain]:
        parts = [(self.parts[group.number], group.hypers) for group in groups]
        return [LeafChain(one.places, one.optimizer.stages, hypers) for one, hypers in parts]

    def shared_entries(self) -> dict[str, Any]:
        """Return the shared scalars, as the groups of a checkpoint store them."""
        if not isinstance(self.shared, Shared):
            return {}
        found: dict[str, Any] = {CALLS: int(self.shared.step)}
        for key, (place, at) in self._keys.items():
            found[key] = float(self.shared.stages[place][at])
        for key, place in self._opened.items():
            found[key] = int(self.shared.opened[place])
        return found

    def write_shared(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write the shared scalars into parameter groups, so that every checkpoint has them."""
        entries = self.shared_entries()
        for group in groups if entries else ():
            group.update(entries)

    def check_shared(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if groups of a checkpoint lack a shared scalar, or differ in one."""
        wanted = self.shared_entries()
        found = [{key: group[key] for key in wanted if key in group} for group in groups]
        if not wanted:
            return
        # Earlier versions did not write how often gates have opened.
        missing = sorted(wanted.keys() - found[0].keys() - self._opened.keys())
        # By their text, since NaN differs from itself.
        if missing or any(repr(one) != repr(found[0]) for one in found):
            what = f"it has no {', '.join(missing)}" if missing else "its groups differ in that"
            raise ValueError(
                f"this checkpoint lacks the scalars that all parameters of {self.optimizer} share: "
                f"{what}; load a checkpoint of this chain"
            )

    def load_shared(self, groups: Sequence[dict[str, Any]]) -> None:
        """Load the shared scalars from the groups of a checkpoint."""
        self.check_shared(groups)
        if not isinstance(self.shared, Shared):
            return
        with torch.no_grad():
            self.shared.step.fill_(groups[0][CALLS])
            for key, (place, at) in self._keys.items():
                self.shared.stages[place][at].copy_(as_tensor(groups[0][key]))
            for key, place in self._opened.items():
                # Without this entry, schedules depended on the number of calls.
                self.shared.opened[place].fill_(groups[0].get(key, groups[0][CALLS]))
        self.write_shared(groups)

    def views(self, groups: Sequence[Group], states_of: StatesOf) -> list[Tensor]:
        """Return the parameters to evaluate with, group by group."""
        views: list[Tensor] = []
        with torch.no_grad():
            for group, chain in zip(groups, self._chains_of(groups), strict=True):
                params, names = group.params, group.labels()
                given = group, params, names, [True] * len(params)
                states = states_of(*given) if chain.stages else [NO_STATE] * len(params)
                for param, name, state in zip(params, names, states, strict=True):
                    leaf = StepLeaf(len(views), param.detach(), state, chain, name)
                    views.append(leaf_by_leaf.view_leaf(leaf))
        return views

    def explain(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Any]]) -> str:
        """Return which executor steps which parameters, one line for each kind of parameter.

        If there are several groups, each line begins with the number of its group.
        """
        params = [param for group in groups for param in group.params]
        chains = self._chains_of(groups)
        every = [stage for chain in chains for stage in chain.stages]
        lines: list[str] = []
        for group, chain in zip(groups, chains, strict=True):
            executor = in_place(self.parts[group.number].optimizer.executor, params, every)
            head = f"param_groups[{group.number}]: " if len(self.parts) > 1 else ""
            found = [(param, group.hypers) for param in group.params]
            counts = [state.get(one, {}).get("step") for one in group.params]
            step = 1.0 + max([int(one) for one in counts if is_step_count(one)] or [0])
            lines += [head + line for line in chain_lines(chain.stages, executor, found, step)]
        return "\n".join([*lines, *waiting_lines(self.optimizer)])
