"""Parameter groups in flat buffers, with torch's dicts of state as views of others.

What torch's users may change between steps (parameters, groups, entries of state) is compared with
what was bound, by loops in C. Where something is new, parameters and state are bound again, with
the values of now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim._torch import DisableTorchFunction
from functional_optim.core.chain import Chain
from functional_optim.core.first_state import with_first_values
from functional_optim.core.initial import StateFields
from functional_optim.core.state import LeafState, State
from functional_optim.core.torch_state import to_entries
from functional_optim.core.tree import Path
from functional_optim.frontends.group_tensors import Entries, Group
from functional_optim.frontends.torch_entries import leaf_state
from functional_optim.kernels import in_place
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.optimizer.bound_buffer import copy_states
from functional_optim.plan.guard import MemoryGuard

Given = Sequence[Tensor | None]
"""Gradients, one for each parameter, group by group."""


class _Bound(BoundOptimizer):
    """Hyper-parameters and names are those of groups."""

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

    def use(self, hypers: list[tuple[Any, ...]]) -> None:
        """Step by these from now on."""
        self._use(hypers)

    def unstepped(self) -> list[int]:
        """Places of the parameters that have not been stepped."""
        return [
            one.index
            for buffer in self._buffers
            for one, made in zip(buffer.segments, buffer.made(), strict=True)
            if not made
        ] + [i for i in self._others if not int(self._states[i].step)]

    def _hypers_of(self, optimizer: Chain) -> list[tuple[Any, ...]]:
        return self._given[1]

    def _names_of(self, paths: Sequence[Path]) -> list[str]:
        return self._given[0]


class _Taken(NamedTuple):
    """Record of a binding."""

    bound: _Bound
    sizes: list[int]
    """How many parameters each group has."""
    given: list[Tensor]
    """All of them, one after the other."""
    params: list[Tensor]
    """Each once."""
    groups: list[int]
    """The group of each of those."""
    forms: list[StateFields]
    """For each group."""
    entries: list[Any]
    """All values in the dicts of state."""
    tensors: list[Tensor]
    """Those that are tensors."""
    guard: MemoryGuard
    """Where they lie."""


class FlatGroups:
    """Steps the parameters of all groups, in flat buffers.

    Args:
        optimizer: the chain.
        made_for: for groups by number, the hyper-parameters for which state before the first step
            was made; it is written to.
    """

    def __init__(self, optimizer: Optimizer, made_for: dict[int, tuple[Any, ...]]) -> None:
        self._optimizer, self._made_for = optimizer, made_for
        self._taken: _Taken | None = None
        self._hypers: list[tuple[Any, ...]] = []

    def bound(self, groups: Sequence[Group], state: Entries) -> BoundOptimizer | None:
        """Return the bound step, or None if there are no parameters."""
        taken = self._now(groups, state)
        return None if taken is None else taken.bound

    def step(
        self,
        groups: Sequence[Group],
        state: Entries,
        given: Given | None = None,
        measured: Sequence[Tensor] = (),
    ) -> None:
        """Step every parameter that has a gradient.

        Args:
            groups: as they are now.
            state: torch's dicts.
            given: a gradient or None for each parameter, group by group; None: their ``.grad``.
            measured: totals of the chain's measured stages.
        """
        taken = self._now(groups, state)
        if taken is None:
            return
        if not all(map(is_, self._hypers, [group.hypers for group in groups])):
            self._hypers = [group.hypers for group in groups]
            taken.bound.use([self._hypers[number] for number in taken.groups])
        if given is not None and len(taken.params) < len(taken.given):  # some are there twice
            last = dict(zip(map(id, taken.given), given, strict=True))
            given = [last[id(param)] for param in taken.params]
        self._begin(taken, given)
        taken.bound.step(given, measured=measured)

    def bind(self, groups: Sequence[Group], state: Entries) -> _Taken | None:
        """Move parameters and state into flat buffers; the dicts of state hold views of those.

        Returns:
            What was bound; None if there are no parameters.

        Raises:
            ValueError: a state that does not fit; nothing has changed then.
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
        self._made_for.update((group.number, group.hypers) for group in groups)
        self._release()
        if not params:
            return None
        executor = in_place(self._optimizer.executor, params, stages)
        # What overrides change is in the options of the groups.
        optimizer = replace(self._optimizer.using(executor=executor), overrides=())
        bound = _Bound(optimizer, params, names, hypers, given)
        for param, own, one in zip(params, hypers, bound.leaf_states, strict=True):
            state[param] = {**state.get(param, {}), **to_entries(stages, own, param, one)}
        entries = [value for param in params for value in state[param].values()]
        tensors = [value for value in entries if isinstance(value, Tensor)]
        self._hypers = [group.hypers for group in groups]
        self._taken = _Taken(
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
        return self._taken

    def _now(self, groups: Sequence[Group], state: Entries) -> _Taken | None:
        """Return the binding; bind again if it no longer holds."""
        taken = self._taken
        if taken is None or not self._holds(taken, groups, state):
            return self.bind(groups, state)
        return taken

    def _release(self) -> None:
        """Give every parameter memory of its own again."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.bound.release()

    def _holds(self, taken: _Taken, groups: Sequence[Group], state: Entries) -> bool:
        """Return True if parameters and state are the bound tensors, with the same fields."""
        return (
            _same_params(taken, groups)
            and _same_entries(taken, state)
            and all(
                group.hypers is known or forms.hold(group.hypers)
                for group, known, forms in zip(groups, self._hypers, taken.forms, strict=True)
            )
        )

    def _state_of(
        self, param: Tensor, state: Entries, name: str, hypers: tuple[Any, ...], number: int
    ) -> LeafState:
        """Return the state in a dict, or a new one."""
        stages, made_for = self._optimizer.stages, self._made_for.get(number)
        state.setdefault(param, {})
        return leaf_state(stages, hypers, param, state, name, made_for=made_for)

    def _begin(self, taken: _Taken, given: Given | None) -> None:
        """State of what is about to make its first step, from the hyper-parameters of now."""
        for i in taken.bound.unstepped():
            param = taken.params[i]
            if (param.grad if given is None else given[i]) is not None:
                number, own = taken.groups[i], taken.bound.leaf_states[i]
                hypers, made_for = self._hypers[number], self._made_for.get(number)
                stages = self._optimizer.stages
                made = with_first_values(stages, hypers, param, own, made_for)
                if made is not own:
                    copy_states([own], [made])


def _same_params(taken: _Taken, groups: Sequence[Group]) -> bool:
    """Return True if groups have the parameters that were bound, and these lie where they did."""
    if [len(group.params) for group in groups] != taken.sizes:
        return False
    if not all(map(is_, chain.from_iterable(group.params for group in groups), taken.given)):
        return False
    try:
        taken.bound.layout.check()
    except RuntimeError:  # something gave parameters other memory
        return False
    return True


def _same_entries(taken: _Taken, state: Entries) -> bool:
    """Return True if the dicts of state hold the bound values, at their addresses."""
    entries = list(chain.from_iterable(map(dict.values, _dicts(state, taken.params))))
    if len(entries) != len(taken.entries) or not all(map(is_, entries, taken.entries)):
        return False
    with DisableTorchFunction():
        return taken.guard.hold(taken.tensors)


def _dicts(state: Entries, params: Sequence[Tensor]) -> Sequence[dict[str, Any]]:
    """The dict of each parameter."""
    if len(state) == len(params) and all(map(is_, state, params)):
        return list(state.values())  # a tensor's hash is Python's, one call for each
    nothing: Mapping[str, Any] = {}
    return [dict(state.get(param, nothing)) for param in params]
