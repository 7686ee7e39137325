"""A TorchOptimizer that is stepped a few parameters at a time, by gradients that it is given."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import LeafState, Optimizer, State, TorchOptimizer
from functional_optim.core.links import addresses
from functional_optim.core.torch_state import from_entries, to_entries
from functional_optim.core.tree import flatten, leaf_states
from functional_optim.frontends.group_steps import NO_STATE, GroupSteps
from functional_optim.frontends.group_tensors import Group
from functional_optim.frontends.torch_schedule import guarded
from functional_optim.plan.leaf_by_leaf import checked_leaf
from functional_optim.plan.shared_numbers import check_shared
from functional_optim.plan.step_leaves import StepLeaf

PLANS = 64
"""For how many buckets plans are kept."""


class _Bucket(NamedTuple):
    """Parameters that are stepped together."""

    parts: list[tuple[int, list[Tensor], list[str]]]
    """Of each group of them the number, its parameters, and their names."""
    steps: GroupSteps

    def of(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups of these parameters alone, with the options of now."""
        return [Group(groups[k].hypers, params, names, k) for k, params, names in self.parts]


class NamedGroups(TorchOptimizer):
    """Parameter groups, state and checkpoints of a TorchOptimizer; each step is of some parameters.

    Args:
        params: by name.
        optimizer: with an executor that is taken as it is.
        state: where to go on from; None to begin.

    Raises:
        ValueError: a state of another tree or optimizer; an override that is for no parameter.
    """

    def __init__(
        self, params: Mapping[str, Tensor], optimizer: Optimizer, state: State | None = None
    ) -> None:
        self._by_name = dict(params)
        self._given = {} if state is None else _checked(self._by_name, optimizer, state)
        self._buckets: dict[tuple[str, ...], _Bucket] = {}
        super().__init__(list(params.items()), optimizer)
        self._given = {}
        self._group_of = {
            name: number
            for number, group in enumerate(self.param_groups)
            for name in group["param_names"]
        }
        self._steps = GroupSteps(optimizer.executor, masks=PLANS)
        if state is not None and self._chains.keeps_numbers:
            self._chains.shared = state.shared

    def state_tree(self) -> State:
        """The state as :meth:`Optimizer.init` makes it, by name; the tensors that are stepped."""
        groups = self._groups()
        leaves = {name: self._leaf_at(groups[self._group_of[name]], name) for name in self._by_name}
        return State(leaves, self._chains.shared)

    def step_some(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Step these parameters, in place, by as few calls of a kernel as can be."""
        given = {id(self._by_name[k]): one for k, one in zip(names, gradients, strict=True)}
        groups, steps = self._groups(), self._steps
        if not self._chains.keeps_numbers:  # else the others take part, without gradients
            bucket = self._bucket_of(tuple(names))
            groups, steps = bucket.of(groups), bucket.steps

        def gradients_of(params: list[Tensor]) -> list[Tensor | None]:
            return [given.get(id(param)) for param in params]

        steps.step(self._chains.now(groups, self.state, self._leaf_state, gradients_of))

    def _bucket_of(self, names: tuple[str, ...]) -> "_Bucket":
        found = self._buckets.get(names)
        if found is None:
            if len(self._buckets) >= PLANS:
                self._buckets.clear()
            own: dict[int, list[str]] = {}
            for name in names:
                own.setdefault(self._group_of[name], []).append(name)
            parts = [(k, [self._by_name[one] for one in some], some) for k, some in own.items()]
            found = self._buckets[names] = _Bucket(parts, GroupSteps(self._optimizer.executor))
        return found

    def state_dict(self) -> dict[str, Any]:
        """As :class:`TorchOptimizer`, with the numbers of now that belong to no parameter."""
        self._chains.show(self.param_groups)
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :class:`TorchOptimizer`; steps are planned anew."""
        super().load_state_dict(dict(state_dict))
        self._buckets.clear()

    def use(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Write hyper-parameters of another optimizer of this chain to the groups that take them.

        Args:
            optimizer: with the same overrides.
            names: of its hyper-parameters.

        Raises:
            ValueError: an option that the state was not made for; nothing is changed then.
        """
        known = addresses(optimizer.links)
        meant = {pair for name in names for pair in known[name]}
        numbers = range(len(self.param_groups))
        changes = [self._changes(optimizer, number, meant) for number in numbers]
        self._optimizer = optimizer
        self._options.clear()
        for number, change in zip(numbers, changes, strict=True):
            group = self.param_groups[number]
            group.update(change)
            self.param_groups[number] = guarded(group, self._names_of(number))

    def _changes(
        self, optimizer: Optimizer, number: int, meant: set[tuple[int, str]]
    ) -> dict[str, Any]:
        """Return the options that a group takes from another optimizer: all but overrides."""
        names = self.param_groups[number]["param_names"]
        shape = tuple(self._by_name[names[0]].shape)
        chain = optimizer.chain_at((names[0],), shape)
        own = optimizer.of_chain(chain)
        found = {}
        for name, pairs in addresses(own.links).items():
            for k, field in pairs:
                place = chain.places[k]
                value, wanted = own.hyper[name], getattr(optimizer.links[place].hyper, field)
                if (place, field) in meant and (value is wanted or value == wanted):
                    found[name] = value
        for name in self._one_of_each(number) if chain.stages else ():
            param = self._by_name[name]
            own = self.state[param]
            from_entries(chain.stages, chain.hypers, param, own, name, begins_anew=True)
        return found

    def _one_of_each(self, number: int) -> Collection[str]:
        """Return a name for each shape and dtype of a group, on which fields of state depend."""
        names = self.param_groups[number]["param_names"]
        return {(one.shape, one.dtype): k for k in names for one in [self._by_name[k]]}.values()

    def _leaf_at(self, group: Group, name: str) -> LeafState:
        if not self._optimizer_of(group.number).stages:
            return NO_STATE
        return self._leaf_state(group, self._by_name[name], name)

    def _complete_state(self, number: int) -> None:
        """State that was given, and of the other parameters the first one."""
        group, own = self.param_groups[number], self._optimizer_of(number)
        hypers = self._hypers(number, group)
        for name in group["param_names"] if self._given and own.stages else ():
            param = self._by_name[name]
            self.state[param] = to_entries(own.stages, hypers, param, self._given[name])
            # One of no step is to be that of these parameters, or its count is wrong.
            from_entries(own.stages, hypers, param, self.state[param], name)
        super()._complete_state(number)


def _checked(
    params: Mapping[str, Tensor], optimizer: Optimizer, state: State
) -> dict[str, LeafState]:
    """The state of each parameter, by name.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    names, spec = flatten({name: name for name in params}, "")
    leaves = dict(zip(names, leaf_states(spec, state), strict=True))
    chains = dict(zip(names, optimizer.chains_for(params), strict=True))
    check_shared(optimizer.links, state.shared)
    for name, leaf in leaves.items():
        checked_leaf(StepLeaf(0, params[name], leaf, chains[name], name), None)
    return leaves
