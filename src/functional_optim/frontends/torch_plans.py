"""The planned steps of torch-like parameter groups, whose parameters lie where they like."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.initial import Field, fields_of
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.kernels import EXECUTORS, Executor, in_place
from functional_optim.plan import StepPlan, engine
from functional_optim.plan.engine import Item
from functional_optim.plan.places import grads_of

PLANS = 8
"""For how many sets of missing gradients plans are kept."""

_HYPERS, _PARAMS = attrgetter("hypers"), attrgetter("params")  # no frame for each step

_Forms = dict[Any, tuple[tuple[Field, ...], ...]]


class _Taken(NamedTuple):
    """The parameters and entries of state for which plans hold."""

    sizes: list[int]
    """How many parameters each group has."""
    given: list[Tensor]
    """All of them, group by group."""
    params: list[Tensor]
    """Each once."""
    entries: list[Any]
    """All values in their dicts of state."""
    hypers: list[tuple[Any, ...]]
    """Of each group, for which the state was checked."""
    forms: list[_Forms]
    """The fields of state in each group."""
    plans: dict[Any, StepPlan]
    """By which gradients are missing."""


class TorchPlans:
    """Keeps the plans of a torch.optim front-end, and sees whether they still hold.

    Args:
        stages: of the chain.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._taken: _Taken | None = None

    def prepared(
        self,
        groups: Sequence[Group],
        state: Entries,
        state_of: Callable[[Group, Tensor, str], LeafState],
        executor: str,
    ) -> Callable[[], object]:
        """A step of every parameter that has a gradient, of which nothing is refused any more.

        Args:
            groups: as they are now.
            state: torch's dicts.
            state_of: gives the state of a parameter, which is written to.
            executor: the name of the chain's.

        Returns:
            What makes it; the steps after it are planned.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient or a state that does not fit; no
                parameter was changed.
        """
        taken = self._taken
        if taken is not None and self._holds(taken, groups, state):
            found: list[Any] = grads_of(taken.params)
            mask = None
            if type(None) in map(type, found):
                mask = _mask(found)
                found = [one for one in found if one is not None]
            plan = taken.plans.get(mask)
            if plan is not None and plan.holds():
                steps = plan.prepared(found, list(map(_HYPERS, groups)))
                if steps is not None:
                    return steps.make
        return self._unplanned(groups, state, state_of, executor)

    def _unplanned(
        self,
        groups: Sequence[Group],
        state: Entries,
        state_of: Callable[[Group, Tensor, str], LeafState],
        executor: str,
    ) -> Callable[[], object]:
        """The same where no plan holds: each parameter is looked at."""
        items = items_of(groups, state_of)
        found = EXECUTORS[in_place(executor, [item.param for item in items])]
        make = engine.prepared(self._stages, found, items)

        def step() -> None:
            make()
            self._learn(groups, state, found, items)

        return step

    def _learn(
        self, groups: Sequence[Group], state: Entries, executor: Executor, items: Sequence[Item]
    ) -> None:
        """Plan the steps after one that was made of all items with a gradient."""
        held = {id(value) for value in _values(state, [item.param for item in items])}
        if not all(id(one) in held for item in items for one in _parts(item)):
            return  # made of what is in the dicts, as of a sparse state: made anew each time
        numbers = {id(param): place for place, one in enumerate(groups) for param in one.params}
        plan = StepPlan(self._stages, executor, items, [numbers[id(item.param)] for item in items])
        taken = self._taken
        if taken is None or not self._holds(taken, groups, state):
            taken = self._taken = self._taken_now(groups, state)
        present = {id(item.param) for item in items}
        mask = bytes(id(param) in present for param in taken.params)
        if len(taken.plans) >= PLANS:
            taken.plans.clear()
        taken.plans[None if all(mask) else mask] = plan

    def _taken_now(self, groups: Sequence[Group], state: Entries) -> _Taken:
        given = [param for group in groups for param in group.params]
        params = list({id(param): param for param in given}.values())
        return _Taken(
            [len(group.params) for group in groups],
            given,
            params,
            _values(state, params),
            [group.hypers for group in groups],
            [self._forms_of(group) for group in groups],
            {},
        )

    def _holds(self, taken: _Taken, groups: Sequence[Group], state: Entries) -> bool:
        """Whether groups have these parameters, and these the same entries of state."""
        lists = list(map(_PARAMS, groups))
        if list(map(len, lists)) != taken.sizes:
            return False
        if not all(map(is_, chain.from_iterable(lists), taken.given)):
            return False
        entries = _values(state, taken.params)
        if len(entries) != len(taken.entries) or not all(map(is_, entries, taken.entries)):
            return False
        return self._forms_hold(taken, groups)

    def _forms_hold(self, taken: _Taken, groups: Sequence[Group]) -> bool:
        """Whether hyper-parameters ask for the state that there is."""
        for number, group in enumerate(groups):
            if group.hypers is not taken.hypers[number]:
                if self._forms_of(group) != taken.forms[number]:
                    return False
                taken.hypers[number] = group.hypers
        return True

    def _forms_of(self, group: Group) -> _Forms:
        kinds = {(param.shape, param.dtype) for param in group.params}
        return {kind: fields_of(self._stages, group.hypers, *kind) for kind in kinds}


def items_of(
    groups: Sequence[Group], state_of: Callable[[Group, Tensor, str], LeafState]
) -> list[Item]:
    """The parameters that have a gradient, each once, as a step takes them.

    Args:
        groups: as they are now.
        state_of: gives the state of a parameter, which is written to.

    Raises:
        TypeError, ValueError: a gradient that does not fit its parameter.
    """
    items = []
    seen: set[int] = set()
    for group in groups:
        for param, name in group.every():
            grad = param.grad
            if grad is None or id(param) in seen:
                continue
            seen.add(id(param))
            check_grad(param, grad, name)
            items.append(Item(param, grad, state_of(group, param, name), group.hypers, name))
    return items


def _parts(item: Item) -> list[Tensor]:
    """The tensors of a leaf's state."""
    return [item.state.step, *state_tensors(item.state.stages)]


def _mask(gradients: Sequence[Any]) -> bytes:
    return bytes([one is not None for one in gradients])


def _values(state: Entries, params: Sequence[Tensor]) -> list[Any]:
    """All that the dicts of these parameters hold, one after the other."""
    if len(state) == len(params) and all(map(is_, state, params)):
        dicts: Any = state.values()  # a tensor's hash is Python's, one call for each
    else:
        dicts = [state.get(param, {}) for param in params]
    return list(chain.from_iterable(map(dict.values, dicts)))
