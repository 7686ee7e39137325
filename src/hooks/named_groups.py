"""TorchOptimizer that steps some of its parameters at a time, with gradients as arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim import Optimizer, State
from functional_optim.engine.groups import NO_STATE, BucketMember, ExplicitGradients
from functional_optim.engine.options import guard_schedules
from functional_optim.engine.recipes import recipe_of_optimizer
from functional_optim.engine.stages import hyper_positions
from functional_optim.engine.states import from_entries, states_by_name, to_entries


class NamedGroups(ExplicitGradients):
    """Parameter groups, state and checkpoints of a TorchOptimizer that steps parameters by name.

    Args:
        params: by name.
        optimizer: its executor is used unchanged.
        state: the state to continue from; None to start.

    Raises:
        ValueError: a state of another tree or optimizer; an override that matches no parameter.
    """

    def __init__(
        self, params: Mapping[str, Tensor], optimizer: Optimizer, state: State | None = None
    ) -> None:
        self._by_name = dict(params)
        self._initial_state = (
            {} if state is None else states_by_name(optimizer, self._by_name, state)
        )
        super().__init__(list(params.items()), recipe_of_optimizer(optimizer))
        self._initial_state = {}
        self._group_of = {
            name: number
            for number, group in enumerate(self.param_groups)
            for name in group["param_names"]
        }
        if state is not None and self._chains.has_shared:
            self._chains.shared = state.shared

    def state_tree(self) -> State:
        """Return the state by name, as :meth:`Optimizer.init` does, without copying tensors."""
        groups, leaves = self._groups(), {}
        for name, param in self._by_name.items():
            number = self._group_of[name]
            has_state = self._optimizer_of(number).stages
            own = groups[number], [param], [name], [True]
            leaves[name] = self._leaf_states(*own)[0] if has_state else NO_STATE
        return State(leaves, self._chains.shared)

    def step_some(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Step these parameters in place, in as few kernel calls as possible."""
        by_id = {id(self._by_name[k]): one for k, one in zip(names, gradients, strict=True)}

        def gradients_of(params: list[Tensor]) -> list[Tensor | None]:
            return [by_id.get(id(param)) for param in params]

        groups = self._groups()
        bucket = None  # with shared scalars, step all, some without gradients
        if not self._chains.has_shared:
            bucket = self._bucket(tuple(names), lambda: self._members_of(names))
        self._lock.run(self._step_bucket, bucket, groups, gradients_of)

    def _members_of(self, names: Sequence[str]) -> list[BucketMember]:
        own: dict[int, list[str]] = {}
        for name in names:
            own.setdefault(self._group_of[name], []).append(name)
        return [
            BucketMember(number, [self._by_name[one] for one in some], some)
            for number, some in own.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        self._chains.write_shared(self.param_groups)
        return super().state_dict()

    def use(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Write hyper-parameters of another optimizer to the groups without an override for them.

        Args:
            optimizer: with the same chain and overrides.
            names: of the hyper-parameters.

        Raises:
            ValueError: an option that does not fit the state; nothing is changed.
        """
        known = hyper_positions(optimizer.links)
        positions = {pair for name in names for pair in known[name]}
        numbers = range(len(self.param_groups))
        changes = [self._changes(optimizer, number, positions) for number in numbers]
        self._optimizer = optimizer
        for number, change in zip(numbers, changes, strict=True):
            group = self.param_groups[number]
            group.update(change)
            self.param_groups[number] = guard_schedules(group, self._optimizer_of(number).hyper)

    def _changes(
        self, optimizer: Optimizer, number: int, positions: set[tuple[int, str]]
    ) -> dict[str, Any]:
        """Return the options that a group takes from another optimizer: all except overrides."""
        names = self.param_groups[number]["param_names"]
        shape = tuple(self._by_name[names[0]].shape)
        chain = optimizer.chain_at((names[0],), shape)
        own = optimizer.of_chain(chain)
        found = {}
        for name, pairs in hyper_positions(own.links).items():
            for k, field in pairs:
                place = chain.places[k]
                value, wanted = own.hyper[name], getattr(optimizer.links[place].hyper, field)
                if (place, field) in positions and (value is wanted or value == wanted):
                    found[name] = value
        # Fields of state depend on shape and dtype, so one parameter of each is checked.
        samples = {(one.shape, one.dtype): k for k in names for one in [self._by_name[k]]}
        for name in samples.values() if chain.stages else ():
            param = self._by_name[name]
            state = self.state[param]
            from_entries(chain.stages, chain.hypers, param, state, name, reinit=True)
        return found

    def _complete_state(self, number: int) -> None:
        """Write the initial state, and the first state of parameters without one."""
        group, own = self.param_groups[number], self._optimizer_of(number)
        hypers = self._options_of(number).hypers(group)
        for name in group["param_names"] if self._initial_state and own.stages else ():
            param = self._by_name[name]
            self.state[param] = to_entries(own.stages, hypers, param, self._initial_state[name])
            # Raises an error if the state is not the state of this parameter.
            from_entries(own.stages, hypers, param, self.state[param], name)
        super()._complete_state(number)
