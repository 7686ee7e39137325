"""Composed steps reuse their plans: a steady step plans nothing, and steps no leaf alone."""

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import (
    TorchOptimizer,
    adamw,
    chain,
    partition,
    sgd,
    weight_decay,
)
from functional_optim.plan import item_steps
from functional_optim.plan.step_plan import BoundStep

from ..choices import case
from ..composition.trees import (
    COMPOSED,
    grads_at,
    params_of,
)
from ..tensors import assert_same, normal


def named() -> dict[str, torch.Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def test_a_wrong_gradient_changes_nothing_in_a_planned_step() -> None:
    params = named()
    optimizer = TorchOptimizer(params.items(), COMPOSED["batches of parts"]())
    for step in range(6):
        for one, grad in grads_at(step).items():
            params[one].grad = grad
        optimizer.step()
    before = copy.deepcopy((params, optimizer.state_dict()))
    for name in ("body.weight", "body.bias"):
        right = params[name].grad
        assert right is not None
        params[name].grad = right.to_sparse()
        with case(name=name), pytest.raises(RuntimeError, match=f"gradient at '{name}'"):
            optimizer.step()
        params[name].grad = right
        assert_same(dict(params), before[0])
        assert_same(optimizer.state_dict()["state"], before[1]["state"])
        assert optimizer.state_dict()["param_groups"] == before[1]["param_groups"]


def test_a_run_that_is_refused_leaves_planned_runs_before_it_unmade(fused_on_the_cpu: None) -> None:
    """A run that a strict executor refuses leaves the parameters of earlier runs unchanged.

    A new value of a hyper-parameter causes the refusal after four planned steps.
    """
    vector, matrix = (nn.Parameter(normal(*shape)) for shape in ((3,), (4, 2)))
    decays = chain(weight_decay(0.0), adamw(0.1, weight_decay=0.1))
    parts = partition({"v": sgd(0.1, momentum=0.9), "m": decays}, two_dimensional)
    optimizer = TorchOptimizer([vector, matrix], parts.using(executor="fused"))
    for number in range(4):
        vector.grad, matrix.grad = normal(3, seed=number), normal(4, 2, seed=number)
        optimizer.step()
    before = copy.deepcopy(([vector, matrix], optimizer.state_dict()["state"]))
    coupled = next(k for k in optimizer.param_groups[1] if k.startswith("weight_decay."))
    optimizer.param_groups[1][coupled] = 0.1
    with pytest.raises(ValueError, match="one weight decay"):
        optimizer.step()
    assert_same([vector, matrix], before[0])
    assert_same(optimizer.state_dict()["state"], before[1])


def two_dimensional(path: Any, shape: Any) -> str:
    return "m" if len(shape) == 2 else "v"


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the runs of a step, and interrupt the process before the first of them."""
    made: list[int] = []
    before = BoundStep.run

    def make(self: BoundStep) -> None:
        if not made:
            os.kill(os.getpid(), signal.SIGINT)
        made.append(len(made))
        before(self)

    monkeypatch.setattr(BoundStep, "run", make)
    return made


def test_an_interrupt_waits_until_all_runs_are_made(request: pytest.FixtureRequest) -> None:
    params, chosen = named(), COMPOSED["batches of parts"]()
    twin = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    both = [(TorchOptimizer(one.items(), chosen), one) for one in (params, twin)]
    for step in range(4):
        for optimizer, own in both:
            for one, grad in grads_at(step).items():
                own[one].grad = grad
            optimizer.step()
    both[1][0].step()
    made = request.getfixturevalue("interrupted")
    with pytest.raises(KeyboardInterrupt):
        both[0][0].step()
    assert len(made) == 2
    assert_same(dict(params), dict(twin))
    assert both[0][0].shared == both[1][0].shared


def test_parameters_that_lie_in_another_way_are_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone: list[int] = []
    prepared = item_steps.prepare

    def noted(stages: Any, executor: Any, items: Any, *more: Any, **options: Any) -> Any:
        alone.append(len(items))
        return prepared(stages, executor, items, *more, **options)

    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]
    parts = partition(
        {"two": adamw(lr=0.1), "one": sgd(lr=0.1)},
        lambda path, shape: "two" if len(shape) == 2 else "one",
    )
    optimizer = TorchOptimizer(params, parts)
    for step in range(9):
        if step == 4:
            params[0].data = torch.ones(2, 3).t()
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[params[0]][key] = torch.ones(2, 3).t()
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        if step == 6:
            monkeypatch.setattr(item_steps, "prepare", noted)
        optimizer.step()
    assert alone == []
