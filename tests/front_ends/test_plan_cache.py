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


@pytest.mark.parametrize("name", ["plain", "gate"])
def test_only_the_plans_that_were_not_used_for_longest_are_dropped(
    name: str, built: list[StepPlan]
) -> None:
    """Of plans for three sets of missing gradients, a fourth set drops the least recently used."""
    params = [torch.nn.Parameter(normal(3, seed=k)) for k in range(LAYERS)]
    optimizer = TorchOptimizer(params, OPTIMIZERS[name]())
    optimizer._steps._masks = 3
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for k, param in enumerate(params[:4]):  # so that no missing step makes two counts equal
        optimizer.state[param]["step"].add_(1000 * (k + 1))
    built.clear()
    planned = ""
    for step, key in enumerate("abcabcadacdb"):
        before = len(built)
        for k, param in enumerate(params):
            param.grad = None if k == "abcd".index(key) else normal(3, seed=step)
        optimizer.step()
        planned += key if len(built) > before else "-"
    assert planned == "abc----d---b"
