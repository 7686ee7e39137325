"""Plans of steps with other missing gradients: they are built once, and the oldest are dropped."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    ema,
    sgd,
)
from functional_optim.plan.step_plan import StepPlan

from ..tensors import assert_same, normal

LAYERS = 12
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "plain": lambda: adamw(0.1),
    "gate": lambda: chain(apply_if_finite(2), adamw(0.1)),
    "accumulation": lambda: chain(accumulate(2), sgd(0.1), ema(0.5)),
}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Record every plan that is built."""
    made: list[StepPlan] = []
    before = StepPlan.__init__

    def noted(self: StepPlan, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        before(self, *args, **kwargs)

    monkeypatch.setattr(StepPlan, "__init__", noted)
    return made


def grads_without(layer: int, step: int) -> list[torch.Tensor | None]:
    return [None if k == layer else normal(3, seed=100 * step + k) for k in range(LAYERS)]


def by_groups(optimizer: Optimizer) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters after each step, with the layers dropped in turn."""
    params = [torch.nn.Parameter(normal(3, seed=k)) for k in range(LAYERS)]
    steps = TorchOptimizer(params, optimizer)
    for step in range(10 * LAYERS):
        for param, grad in zip(params, grads_without(step % LAYERS, step), strict=True):
            param.grad = grad
        steps.step()
        yield [one.detach() for one in params]


def by_trees(optimizer: Optimizer) -> Iterator[list[torch.Tensor]]:
    params: Any = [normal(3, seed=k) for k in range(LAYERS)]
    state = optimizer.init(params)
    for step in range(10 * LAYERS):
        optimizer.update_(params, grads_without(step % LAYERS, step), state)
        yield params


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("front_end", [by_groups, by_trees])
def test_layers_that_are_dropped_in_turn_are_planned_once(
    front_end: Any, name: str, built: list[StepPlan]
) -> None:
    """Plans for as many sets of missing gradients as there are layers are kept."""
    reference = OPTIMIZERS[name]().using(executor="reference")
    wanted: Any = [normal(3, seed=k) for k in range(LAYERS)]
    state, counts = reference.init(wanted), []
    for step, found in enumerate(front_end(OPTIMIZERS[name]())):
        counts.append(len(built))
        wanted, state = reference.update(wanted, grads_without(step % LAYERS, step), state)
        assert_same(found, wanted)
    assert counts[0] > 0
    assert counts[-1] == counts[4 * LAYERS - 1]


def planned_steps(name: str, sets: list[set[int]], built: list[StepPlan]) -> list[bool]:
    """Return for each step if it builds plans. Plans of three sets of missing gradients are kept.

    Args:
        sets: for each step, the layers without a gradient, all below 5.
    """
    params = [torch.nn.Parameter(normal(3, seed=k)) for k in range(LAYERS)]
    optimizer = TorchOptimizer(params, OPTIMIZERS[name]())
    optimizer._steps._masks = 3
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for k, param in enumerate(params[:5]):  # so that no missing step makes two counts equal
        optimizer.state[param]["step"].add_(1000 * (k + 1))
    found = []
    for step, missing in enumerate(sets):
        before = len(built)
        for k, param in enumerate(params):
            param.grad = None if k in missing else normal(3, seed=step)
        optimizer.step()
        found.append(len(built) > before)
    return found


@pytest.mark.parametrize("name", ["plain", "gate"])
def test_only_the_plans_that_were_not_used_for_longest_are_dropped(
    name: str, built: list[StepPlan]
) -> None:
    """A fourth set of missing gradients drops the plans of the least recently used set."""
    sets = [{"abcd".index(key)} for key in "abcabcadacdb"]
    planned = planned_steps(name, sets, built)
    assert "".join("-+"[one] for one in planned) == "+++----+---+"


@pytest.mark.parametrize("name", ["plain", "gate"])
def test_dropped_plans_make_room(name: str, built: list[StepPlan]) -> None:
    """Each of 25 sets is planned, and the plans of the last three are kept."""
    subsets = [{k for k in range(5) if number >> k & 1} for number in range(1, 26)]
    planned = planned_steps(name, [*subsets, *subsets[-3:]], built)
    assert planned == [True] * 25 + [False] * 3
