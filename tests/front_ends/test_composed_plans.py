"""Composed steps reuse their plans: a steady step plans nothing, and steps no leaf alone."""

import copy
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    lookahead,
    partition,
    schedule_free_adamw,
    sgd,
    weight_decay,
)
from functional_optim.plan import StepPlan, engine
from functional_optim.plan.decision import Decision
from functional_optim.plan.step_plan import BoundStep

from ..choices import case
from ..composition.trees import (
    COMPOSED,
    MASKS,
    PERIOD,
    grads_at,
    grads_without,
    lrs_at,
    params_of,
)
from ..steady import calls_of, noted_calls
from ..tensors import assert_same, normal, watched


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of functions that a steady step does not need."""
    places = (StepPlan, "__init__"), (engine, "prepare"), (Decision, "add_up")
    return noted_calls(monkeypatch, places)


def named() -> dict[str, torch.Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


@pytest.mark.parametrize("executor", ["reference", "blocked"])
@pytest.mark.parametrize("name", COMPOSED)
def test_planned_steps_are_those_of_update(name: str, executor: str) -> None:
    """Planned steps equal ``update``, with missing gradients and a new learning rate each time."""
    chosen = COMPOSED[name]()
    params, want = named(), params_of()
    optimizer = TorchOptimizer(params.items(), chosen.using(executor=executor))
    state = chosen.init(want)
    for step in range(4 * PERIOD):
        grads, lrs = grads_without(step, MASKS[step % PERIOD]), lrs_at(chosen, step)
        for one, grad in grads.items():
            params[one].grad = grad
        for group in optimizer.param_groups:
            short = {k.split(".")[-1]: v for k, v in lrs.items()}
            group.update({k: v for k, v in short.items() if k in group})
        optimizer.step()
        want, state = chosen.update(want, grads, state, **lrs)
        with case(step=step):
            assert_same({one: p.detach() for one, p in params.items()}, want)
    assert optimizer.shared == chosen.shared(state)
    for one, param in params.items():
        if optimizer.state[param]:
            assert int(optimizer.state[param]["step"]) == int(state.leaves[one].step)


@pytest.mark.parametrize("masks", [(set(),), ({"body.bias"},), MASKS])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_steady_step_plans_nothing_and_steps_no_leaf_alone(
    name: str, masks: tuple[set[str], ...], seen: list[str]
) -> None:
    params = named()
    optimizer = TorchOptimizer(params.items(), COMPOSED[name]())
    for step in range(8 * PERIOD):
        if step == 7 * PERIOD:
            seen.clear()
        for one, grad in grads_without(step, masks[step % len(masks)]).items():
            params[one].grad = grad
        for group in optimizer.param_groups:
            if "lr" in group and isinstance(group["lr"], float):
                group["lr"] = 0.01 / (step + 1)
        optimizer.step()
    assert seen == []


@pytest.mark.parametrize("name", ["batches of parts", "clip over parts", "frozen"])
def test_no_step_holds_its_gradients(name: str) -> None:
    """Gradients are freed when the caller drops them, without the garbage collector."""
    params = named()
    optimizer = TorchOptimizer(params.items(), COMPOSED[name]())
    arrays: list[Any] = []
    gc.disable()
    try:
        for step in range(6):
            for one, grad in watched(grads_at(step), arrays).items():
                params[one].grad = grad
            del grad
            optimizer.step()
            optimizer.zero_grad()
            assert [one() for one in arrays] == [None] * len(arrays)
    finally:
        gc.enable()


ALONE: dict[str, Callable[[], Optimizer]] = {
    "parts": lambda: partition({"odd": sgd(0.1, momentum=0.9), "even": adamw(0.01)}, odd),
    "accumulate": lambda: chain(accumulate(3), adamw(0.01)),
    "lookahead": lambda: chain(adamw(0.1), lookahead(3)),
    "schedule_free": schedule_free_adamw,
    "finite": lambda: chain(apply_if_finite(3), adamw(0.01)),
    "clipped": lambda: chain(clip_by_global_norm(0.1), adamw(0.01)),
    "clipped parts": lambda: chain(clip_by_global_norm(0.1), ALONE["parts"]()),
}


def odd(path: Any, shape: Any) -> str:
    return "odd" if path[0] % 2 else "even"


@pytest.mark.parametrize("name", ALONE)
def test_python_is_called_as_often_for_many_leaves_as_for_few(name: str) -> None:
    counted = []
    for count in (4, 40):
        params = [normal(5, seed=k).requires_grad_() for k in range(count)]
        for k, param in enumerate(params):
            param.grad = normal(5, seed=100 + k)
        optimizer = TorchOptimizer(params, ALONE[name]())
        for _ in range(12):
            optimizer.step()
        counted.append([calls_of(optimizer.step) for _ in range(6)])
    # Torch's blocked operations copy each separate gradient, with one call for each.
    assert max(counted[1]) <= max(counted[0]) + 36


@pytest.mark.parametrize("name", ["batches of parts", "clip over parts", "finite batches"])
@pytest.mark.parametrize("change", ["moved", "state moved", "replaced", "counts", "cleared"])
def test_what_somebody_changed_between_steps_is_seen(name: str, change: str) -> None:
    results = []
    for plans in (True, False):
        params = named()
        optimizer = TorchOptimizer(params.items(), COMPOSED[name]())
        for step in range(9):
            if step == 5:
                changed(optimizer, params["head.weight"], change)
            for one, grad in grads_at(step).items():
                params[one].grad = grad
            if not plans:
                optimizer._steps.forget()
            optimizer.step()
        results.append(({k: p.detach() for k, p in params.items()}, optimizer.state_dict()))
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1]["state"], results[1][1]["state"])


def changed(optimizer: TorchOptimizer, param: torch.Tensor, change: str) -> None:
    entries = optimizer.state[param]
    field = next(k for k, v in entries.items() if isinstance(v, torch.Tensor) and v.dim() == 2)
    if change == "moved":
        param.data = param.data.clone() * 2
    elif change == "state moved":
        entries[field].set_(entries[field].clone() * 2)
    elif change == "replaced":
        entries[field] = entries[field].clone() * 2
    elif change == "counts":
        entries["step"].fill_(7)
        for key in entries:
            if key.endswith(".held") and int(entries[key]):
                entries[key].fill_(5)
    else:
        entries.clear()


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
    prepared = engine.prepare

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
            monkeypatch.setattr(engine, "prepare", noted)
        optimizer.step()
    assert alone == []
