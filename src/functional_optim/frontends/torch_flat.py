"""FlatGroups: parameter groups in flat buffers, with views of flat buffers in torch's state.

Users of torch may change parameters, groups and entries of state between steps. So each step
compares them with the bound tensors, without a Python call per parameter. After a change,
parameters and state are bound again, with their current values.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim._torch import DisableTorchFunction
from functional_optim.core.chain import Chain
from functional_optim.core.state import LeafState, State
from functional_optim.core.state_init import StateFields
from functional_optim.core.state_reinit import reinit_state
from functional_optim.core.torch_state import to_entries
from functional_optim.core.tree import Path
from functional_optim.frontends.group_tensors import Entries, Group, dicts_of
from functional_optim.frontends.torch_entries import leaf_state
from functional_optim.kernels import in_place
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.optimizer.bound_buffer import copy_states
from functional_optim.plan.guard import MemoryGuard

Given = Sequence[Tensor | None]
"""Gradients, one for each parameter, group by group."""


class _BoundGroups(BoundOptimizer):
    """BoundOptimizer with the hyper-parameters and names of parameter groups."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: list[Tensor],
        names: list[str],
        hypers: list[tuple[Any, ...]],
        state: list[LeafState],
    ) -> None:
        self._given = names, hypers
        super().__init__(optimizer, params, State(state))

    @property
    def leaf_states(self) -> list[LeafState]:
        """The state of each parameter."""
        return self._states

    def set_hypers(self, hypers: list[tuple[Any, ...]]) -> None:
        """Set the hyper-parameters of each parameter for all later steps."""
        self._set_hypers(hypers)

    def unstepped(self) -> list[int]:
        """Return the indices of parameters before their first step."""
        return [
            one.index
            for buffer in self._buffers
            for one, count in zip(buffer.segments, buffer.step_counts(), strict=True)
            if not count
        ] + [i for i in self._others if not int(self._states[i].step)]

    def _hypers_of(self, optimizer: Chain) -> list[tuple[Any, ...]]:
        return self._given[1]

    def _names_of(self, paths: Sequence[Path]) -> list[str]:
        return self._given[0]


class _Binding(NamedTuple):
    """Bound groups, with everything that shows if the binding is still valid."""

    bound: _BoundGroups
    sizes: list[int]
    """The number of parameters of each group."""
    given: list[Tensor]
    """The parameters of all groups, in order."""
    params: list[Tensor]
    """The same parameters, each once."""
    groups: list[int]
    """For each of ``params``, the number of its group."""
    forms: list[StateFields]
    """For each group, the fields of its state."""
    entries: list[Any]
    """All values in the dicts of state."""
    tensors: list[Tensor]
    """The tensors among these values."""
    guard: MemoryGuard
    """Checks that these tensors have not moved."""


class FlatGroups:
    """Parameters of all groups in flat buffers, and their steps.

    Args:
        init_hypers: for groups by number, the hyper-parameters for which state before the first
            step was created. Binding writes to it.
    """

    def __init__(self, optimizer: Optimizer, init_hypers: dict[int, tuple[Any, ...]]) -> None:
        self._optimizer, self._init_hypers = optimizer, init_hypers
        self._binding: _Binding | None = None
        self._hypers: list[tuple[Any, ...]] = []

    def bound(self, groups: Sequence[Group], state: Entries) -> BoundOptimizer | None:
        """Return the bound step, or None if there are no parameters."""
        binding = self._current(groups, state)
        return None if binding is None else binding.bound

    def step(
        self,
        groups: Sequence[Group],
        state: Entries,
        given: Given | None = None,
        measured: Sequence[Tensor] = (),
    ) -> None:
        """Step every parameter that has a gradient.

        Args:
            given: a gradient or None for each parameter, group by group; None to read ``.grad``.
            measured: totals of the chain's measured stages.
        """
        binding = self._current(groups, state)
        if binding is None:
            return
        if not all(map(is_, self._hypers, [group.hypers for group in groups])):
            self._hypers = [group.hypers for group in groups]
            binding.bound.set_hypers([self._hypers[number] for number in binding.groups])
        if given is not None and len(binding.params) < len(binding.given):  # duplicate parameters
            last = dict(zip(map(id, binding.given), given, strict=True))
            given = [last[id(param)] for param in binding.params]
        self._update_initial_state(binding, given)
        binding.bound.step(given, measured=measured)

    def bind(self, groups: Sequence[Group], state: Entries) -> _Binding | None:
        """Move parameters and state into flat buffers, and put views of them into ``state``.

        Returns:
            The binding, or None if there are no parameters.

        Raises:
            ValueError: a state does not fit; nothing has changed.
        """
        stages = self._optimizer.stages
        found: dict[int, tuple[Tensor, str, int]] = {}
        for group in groups:
            for param, name in group.every():
                found.setdefault(id(param), (param, name, group.number))
        params = [param for param, _, _ in found.values()]
        names = [name for _, name, _ in found.values()]
        numbers = [number for _, _, number in found.values()]
        hypers = [groups[number].hypers for number in numbers]
        given = [
            self._state_of(param, state, name, own, number)
            for param, name, own, number in zip(params, names, hypers, numbers, strict=True)
        ]
        self._init_hypers.update((group.number, group.hypers) for group in groups)
        if self._binding is not None:
            self._binding.bound.release()
            self._binding = None
        if not params:
            return None
        executor = in_place(self._optimizer.executor, params, stages)
        # The options of the groups contain the values of overrides.
        optimizer = replace(self._optimizer.using(executor=executor), overrides=())
        bound = _BoundGroups(optimizer, params, names, hypers, given)
        for param, own, one in zip(params, hypers, bound.leaf_states, strict=True):
            state[param] = {**state.get(param, {}), **to_entries(stages, own, param, one)}
        entries = [value for param in params for value in state[param].values()]
        tensors = [value for value in entries if isinstance(value, Tensor)]
        self._hypers = [group.hypers for group in groups]
        self._binding = _Binding(
            bound,
            [len(group.params) for group in groups],
            [param for group in groups for param in group.params],
            params,
            numbers,
            [StateFields(self._optimizer.stages, own.hypers, own.kinds()) for own in groups],
            entries,
            tensors,
            MemoryGuard(tensors),
        )
        return self._binding

    def _current(self, groups: Sequence[Group], state: Entries) -> _Binding | None:
        """Return the binding. Bind again if it is no longer valid."""
        binding = self._binding
        if binding is None or not self._is_valid(binding, groups, state):
            return self.bind(groups, state)
        return binding

    def _is_valid(self, binding: _Binding, groups: Sequence[Group], state: Entries) -> bool:
        """Return True if parameters and state are the bound tensors, with the same fields."""
        return (
            _has_params(binding, groups)
            and _has_entries(binding, state)
            and all(
                group.hypers is known or forms.is_valid_for(group.hypers)
                for group, known, forms in zip(groups, self._hypers, binding.forms, strict=True)
            )
        )

    def _state_of(
        self, param: Tensor, state: Entries, name: str, hypers: tuple[Any, ...], number: int
    ) -> LeafState:
        stages, init_hypers = self._optimizer.stages, self._init_hypers.get(number)
        state.setdefault(param, {})
        return leaf_state(stages, hypers, param, state, name, init_hypers=init_hypers)

    def _update_initial_state(self, binding: _Binding, given: Given | None) -> None:
        """Compute state before a first step from the current parameters and hyper-parameters."""
        for i in binding.bound.unstepped():
            param = binding.params[i]
            if (param.grad if given is None else given[i]) is not None:
                number, own = binding.groups[i], binding.bound.leaf_states[i]
                hypers, init_hypers = self._hypers[number], self._init_hypers.get(number)
                stages = self._optimizer.stages
                made = reinit_state(stages, hypers, param, own, init_hypers)
                if made is not own:
                    copy_states([own], [made])


def _has_params(binding: _Binding, groups: Sequence[Group]) -> bool:
    """Return True if groups have the bound parameters, at the same addresses."""
    if [len(group.params) for group in groups] != binding.sizes:
        return False
    if not all(map(is_, chain.from_iterable(group.params for group in groups), binding.given)):
        return False
    try:
        binding.bound.layout.check()
    except RuntimeError:  # a parameter has other memory
        return False
    return True


def _has_entries(binding: _Binding, state: Entries) -> bool:
    """Return True if the dicts of state have the bound values, at the same addresses."""
    entries = list(chain.from_iterable(map(dict.values, dicts_of(state, binding.params))))
    if len(entries) != len(binding.entries) or not all(map(is_, entries, binding.entries)):
        return False
    with DisableTorchFunction():
        return binding.guard.hold(binding.tensors)
