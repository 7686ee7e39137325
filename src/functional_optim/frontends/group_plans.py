"""Plans of the steps of torch-like parameter groups, and of what these hold."""

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.initial import StateFields
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.kernels import EXECUTORS, Executor, in_place
from functional_optim.native import LOOPS
from functional_optim.plan import StepPlan, engine
from functional_optim.plan.guard import grads_of, mask_of
from functional_optim.plan.item import Item
from functional_optim.plan.leaf_positions import rows_of
from functional_optim.plan.step_plan import Steps

PLANS = 8
"""Largest number of plans that are kept: for different missing gradients, layouts and counts."""

TRIES = 3
"""How often a step of the same form is planned before it is left to the engine."""

HYPERS = attrgetter("hypers")
"""Of a group, or a chain; no frame for each step."""

_PARAMS = attrgetter("params")

StateOf = Callable[[Group, Tensor, str], LeafState]
"""Gives the state of a parameter of a group, by its name."""

Gradients = Callable[[list[Tensor]], list[Tensor | None]]
"""Gives the gradient of each parameter, or None."""


class GroupTensors(NamedTuple):
    """Parameters and entries of state that groups hold now."""

    sizes: list[int]
    """The number of parameters of each group."""
    keys: list[str | None]
    """The keys of all entries of state, None behind those of each parameter."""
    params: list[Tensor]
    values: list[Any]
    """All entries, of which some may be no tensors."""

    @property
    def tensors(self) -> list[Any]:
        """All parameters, and all entries."""
        return [*self.params, *self.values]

    @classmethod
    def of(cls, groups: Sequence[Group], state: Entries) -> "GroupTensors":
        """List what groups hold."""
        lists = list(map(_PARAMS, groups))
        params = list(chain.from_iterable(lists))
        keys, values = _entries_of(state, params)
        return cls(list(map(len, lists)), keys, params, values)


class GroupForm:
    """All that groups hold but the tensors: numbers of parameters, keys, and what options need.

    Args:
        groups: that were stepped.
        held: by the groups.
        stages_of: gives the stages of a group by its place among these.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        held: GroupTensors,
        stages_of: Callable[[int], Sequence[Stage]],
    ) -> None:
        self._sizes, self._keys = held.sizes, held.keys
        self._fields = [
            StateFields(stages_of(place), one.hypers, one.kinds())
            for place, one in enumerate(groups)
        ]
        self._hypers = list(map(HYPERS, groups))
        """Those for which the state was checked."""

    def holds(self, held: GroupTensors, hypers: list[tuple[Any, ...]]) -> bool:
        """Return True if groups hold what they did, but for the tensors."""
        if held.sizes != self._sizes or held.keys != self._keys:
            return False
        if not all(map(is_, hypers, self._hypers)):
            for k, own in enumerate(hypers):
                if own is not self._hypers[k] and not self._fields[k].hold(own):
                    return False
            self._hypers = hypers
        return True


class _Listed(NamedTuple):
    """List of all that a step of parameter groups is made of."""

    held: GroupTensors
    mask: bytes | None
    """Which gradients are present; None if all are."""
    tensors: list[Any]
    """All parameters, all entries, and the gradients that are present."""
    grads: int
    """The number of these gradients."""

    @classmethod
    def of(cls, groups: Sequence[Group], state: Entries, gradients: Gradients) -> "_Listed":
        """List what groups hold now."""
        held = GroupTensors.of(groups, state)
        grads: list[Any] = gradients(held.params)
        mask = mask_of(grads)
        given = grads if mask is None else [one for one in grads if one is not None]
        return cls(held, mask, [*held.params, *held.values, *given], len(given))

    @property
    def form(self) -> Any:
        """All but the tensors."""
        return self.held.sizes, self.held.keys, self.mask


class _GroupPlan:
    """The plan of a step of groups.

    Args:
        stages: of the chain.
        groups: that were stepped.
        listed: what the step was made of.
        plan: of the step.
    """

    def __init__(
        self, stages: Sequence[Stage], groups: Sequence[Group], listed: _Listed, plan: StepPlan
    ) -> None:
        self._form, self._mask = GroupForm(groups, listed.held, lambda _: stages), listed.mask
        self._plan = plan

    def prepared(
        self, listed: _Listed, hypers: list[tuple[Any, ...]], measured: Sequence[Tensor]
    ) -> Steps | None:
        """Check and bind a step; None, with nothing changed, if the plan does not make it."""
        if listed.mask != self._mask or not self._form.holds(listed.held, hypers):
            return None
        return self._plan.prepared(listed.tensors, hypers, measured)

    def items(self, listed: _Listed, hypers: list[tuple[Any, ...]]) -> list[Item] | None:
        """Return the parameters that have a gradient; None if the plan is for another step."""
        if listed.mask != self._mask or not self._form.holds(listed.held, hypers):
            return None
        return self._plan.items(listed.tensors, hypers)


class GroupPlans:
    """Plans of the steps of a torch.optim front-end.

    Args:
        stages: of the chain.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._plans: list[_GroupPlan] = []  # the latest first
        self._failed: list[Any] = []
        """Steps that no plan made, such as those of parameters that share memory."""

    def prepared(
        self,
        groups: Sequence[Group],
        state: Entries,
        state_of: StateOf,
        executor: str,
        gradients: Gradients = grads_of,
        measured: Sequence[Tensor] = (),
    ) -> Callable[[], object]:
        """Return the call that steps every parameter that has a gradient.

        Args:
            groups: as they are now.
            state: torch's dicts.
            state_of: gives the state of a parameter, which is written to.
            executor: the name of the chain's.
            gradients: gives the gradients of parameters; by default their ``.grad``.
            measured: totals of the chain's measured stages; none to take them of these parameters.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient or a state that does not fit; no
                parameter was changed.
        """
        if self._plans:
            listed, hypers = _Listed.of(groups, state, gradients), list(map(HYPERS, groups))
            for plan in self._plans:
                steps = plan.prepared(listed, hypers, measured)
                if steps is not None:
                    return steps.make
        items, numbers = items_of(groups, state_of, gradients)
        found = EXECUTORS[in_place(executor, [item.param for item in items], self._stages)]
        make = engine.prepared(self._stages, found, items, measured)

        def step() -> None:
            make()
            self._learn(_Listed.of(groups, state, gradients), groups, found, items, numbers)

        return step

    def items(
        self, groups: Sequence[Group], state: Entries, state_of: StateOf, gradients: Gradients
    ) -> list[Item]:
        """Return the parameters that have a gradient, each once.

        Args:
            groups, state, state_of, gradients: as for :meth:`prepared`, and so are the errors.
        """
        if self._plans:
            listed, hypers = _Listed.of(groups, state, gradients), list(map(HYPERS, groups))
            for plan in self._plans:
                items = plan.items(listed, hypers)
                if items is not None:
                    return items
        return items_of(groups, state_of, gradients)[0]

    def _learn(
        self,
        listed: _Listed,
        groups: Sequence[Group],
        executor: Executor,
        items: Sequence[Item],
        numbers: Sequence[int],
    ) -> None:
        """Plan the steps after one that was made of all items with a gradient."""
        if listed.grads != len(items) or self._failed.count(listed.form) >= TRIES:
            return
        start = len(listed.tensors) - listed.grads
        rows = rows_of(items, listed.tensors, range(start, len(listed.tensors)))
        if rows is None:
            return  # made of what is in the dicts, as of a sparse state: made anew each time
        plan = StepPlan(self._stages, executor, items, numbers, rows, listed.tensors)
        if plan.takes(listed.tensors):
            self._plans.insert(0, _GroupPlan(self._stages, groups, listed, plan))
            del self._plans[PLANS:]
        else:
            self._failed = [*self._failed[-PLANS:], listed.form]


def items_of(
    groups: Sequence[Group], state_of: StateOf, gradients: Gradients = grads_of
) -> tuple[list[Item], list[int]]:
    """Return the parameters that have a gradient, each once, and the position of their groups.

    Args:
        groups: as they are now.
        state_of: gives the state of a parameter, which is written to.
        gradients: gives the gradients of parameters.

    Raises:
        TypeError, ValueError: a gradient that does not fit its parameter.
    """
    items: list[Item] = []
    numbers: list[int] = []
    every: dict[int, tuple[int, Group, Tensor, str]] = {}
    for number, group in enumerate(groups):
        for param, name in group.every():
            every.setdefault(id(param), (number, group, param, name))
    grads = gradients([param for _, _, param, _ in every.values()])
    for (number, group, param, name), grad in zip(every.values(), grads, strict=True):
        if grad is not None:
            check_grad(param, grad, name)
            items.append(Item(param, grad, state_of(group, param, name), group.hypers, name))
            numbers.append(number)
    return items, numbers


def _entries_of(state: Entries, params: list[Tensor]) -> tuple[list[str | None], list[Any]]:
    """Return the keys of the dicts of these parameters, None behind those of each; all values."""
    loops = LOOPS.loaded
    found = None if loops is None or not isinstance(state, dict) else loops.entries(state, params)
    if found is not None:
        return found
    dicts = list(dicts_of(state, params))
    keys = chain.from_iterable(chain.from_iterable(zip(dicts, repeat((None,)))))
    return list(keys), list(chain.from_iterable(map(dict.values, dicts)))


def dicts_of(state: Entries, params: Sequence[Tensor]) -> Any:
    """Return the dict of each parameter."""
    if len(state) == len(params) and all(map(is_, state, params)):
        return state.values()  # a tensor's hash is Python's, one call for each
    return [state.get(param, {}) for param in params]
