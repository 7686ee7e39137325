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
        if taken is not None and taken.holds(groups, state):
            found: list[Any] = grads_of(taken.params)
            mask = mask_of(found)
            if mask is not None:
                found = [one for one in found if one is not None]
            plan = self._plans.get(mask)
            if plan is not None and plan.holds():
                steps = plan.prepared(found, list(map(HYPERS, groups)))
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
        """Prepare a step without a plan: each parameter is checked."""
        items = items_of(groups, state_of)
        found = EXECUTORS[in_place(executor, [item.param for item in items], self._stages)]
        make = engine.prepared(self._stages, found, items)

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
