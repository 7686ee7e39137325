"""The planned steps of torch-like parameter groups, whose parameters lie where they like."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.frontends.torch_flat import Entries, Group
from functional_optim.frontends.torch_taken import TakenGroups
from functional_optim.kernels import EXECUTORS, Executor, in_place
from functional_optim.plan import StepPlan, engine
from functional_optim.plan.composed.steps import mask_of
from functional_optim.plan.guard import grads_of
from functional_optim.plan.item import Item

PLANS = 8
"""For how many sets of missing gradients plans are kept."""

HYPERS = attrgetter("hypers")
"""Of a group, or a chain; no frame for each step."""

StateOf = Callable[[Group, Tensor, str], LeafState]
"""Gives the state of a parameter of a group, by its name."""

Gradients = Callable[[list[Tensor]], list[Tensor | None]]
"""Gives the gradient of each parameter, or None."""


class TorchPlans:
    """Keeps the plans of a torch.optim front-end, and sees whether they still hold.

    Args:
        stages: of the chain.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._taken: TakenGroups | None = None
        self._plans: dict[Any, StepPlan] = {}  # by which gradients are missing

    def prepared(
        self,
        groups: Sequence[Group],
        state: Entries,
        state_of: StateOf,
        executor: str,
        gradients: Gradients = grads_of,
        measured: Sequence[Tensor] = (),
    ) -> Callable[[], object]:
        """A step of every parameter that has a gradient, of which nothing is refused any more.

        Args:
            groups: as they are now.
            state: torch's dicts.
            state_of: gives the state of a parameter, which is written to.
            executor: the name of the chain's.
            gradients: gives the gradients of parameters; by default their ``.grad``.
            measured: totals of the chain's measured stages; none to take them of these parameters.

        Returns:
            What makes it; the steps after it are planned.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient or a state that does not fit; no
                parameter was changed.
        """
        known = self._known(groups, state, gradients)
        if known is not None:
            plan, found = known
            steps = plan.prepared(found, list(map(HYPERS, groups)), measured)
            if steps is not None:
                return steps.make
        return self._unplanned(groups, state, state_of, executor, gradients, measured)

    def items(
        self, groups: Sequence[Group], state: Entries, state_of: StateOf, gradients: Gradients
    ) -> list[Item]:
        """Return the parameters that have a gradient: those of a plan, or each one checked.

        Args:
            groups, state, state_of, gradients: as for :meth:`prepared`, and so are the errors.
        """
        known = self._known(groups, state, gradients)
        if known is None:
            return items_of(groups, state_of, gradients)
        return known[0].items(known[1], list(map(HYPERS, groups)))

    def _known(
        self, groups: Sequence[Group], state: Entries, gradients: Gradients
    ) -> tuple[StepPlan, list[Tensor]] | None:
        """Return the plan that holds for the gradients there are now, and these; or None."""
        taken = self._taken
        if taken is None or not taken.holds(groups, state):
            return None
        found: list[Any] = gradients(taken.params)
        mask = mask_of(found)
        if mask is not None:
            found = [one for one in found if one is not None]
        plan = self._plans.get(mask)
        return None if plan is None or not plan.holds() else (plan, found)

    def _unplanned(
        self,
        groups: Sequence[Group],
        state: Entries,
        state_of: StateOf,
        executor: str,
        gradients: Gradients,
        measured: Sequence[Tensor],
    ) -> Callable[[], object]:
        """Prepare a step without a plan: each parameter is checked."""
        items = items_of(groups, state_of, gradients)
        found = EXECUTORS[in_place(executor, [item.param for item in items], self._stages)]
        make = engine.prepared(self._stages, found, items, measured)

        def step() -> None:
            make()
            self._learn(groups, state, found, items)

        return step

    def _learn(
        self, groups: Sequence[Group], state: Entries, executor: Executor, items: Sequence[Item]
    ) -> None:
        """Plan the steps after one that was made of all items with a gradient."""
        taken = self._taken
        if taken is None or not taken.holds(groups, state):
            taken = TakenGroups(groups, state, lambda _: self._stages)
        if not taken.has([one for item in items for one in _parts(item)]):
            return  # made of what is in the dicts, as of a sparse state: made anew each time
        numbers = {id(param): place for place, one in enumerate(groups) for param in one.params}
        plan = StepPlan(self._stages, executor, items, [numbers[id(item.param)] for item in items])
        if taken is not self._taken or len(self._plans) >= PLANS:
            self._taken, self._plans = taken, {}
        present = {id(item.param) for item in items}
        mask = bytes(id(param) in present for param in taken.params)
        self._plans[None if all(mask) else mask] = plan


def items_of(
    groups: Sequence[Group], state_of: StateOf, gradients: Gradients = grads_of
) -> list[Item]:
    """The parameters that have a gradient, each once, as a step takes them.

    Args:
        groups: as they are now.
        state_of: gives the state of a parameter, which is written to.
        gradients: gives the gradients of parameters.

    Raises:
        TypeError, ValueError: a gradient that does not fit its parameter.
    """
    every: dict[int, tuple[Group, Tensor, str]] = {}
    for group in groups:
        for param, name in group.every():
            every.setdefault(id(param), (group, param, name))
    items = []
    grads = gradients([param for _, param, _ in every.values()])
    for (group, param, name), grad in zip(every.values(), grads, strict=True):
        if grad is not None:
            check_grad(param, grad, name)
            items.append(Item(param, grad, state_of(group, param, name), group.hypers, name))
    return items


def _parts(item: Item) -> list[Tensor]:
    """The tensors of a leaf's state."""
    return [item.state.step, *state_tensors(item.state.stages)]
