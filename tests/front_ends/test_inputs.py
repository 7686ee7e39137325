"""Inputs of TorchOptimizer for each parameter: mappings by parameter, or by name."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adahessian,
    adamw,
    chain,
    clip_by_global_norm,
    descend,
    freeze,
    hutchinson,
    partition,
    scale_by_adahessian,
    scale_by_sophia,
    sophia,
    with_shape,
)
from functional_optim.plan import StepPlan

from ..choices import case, each
from ..composition.second_order import BOTH, EVERY, given_at, run_given
from ..composition.trees import HOLES, STEPS, grads_at, kind, params_of
from ..tensors import assert_same, normal

CHOSEN: dict[str, tuple[Callable[[], Optimizer], int]] = {
    **BOTH,
    "parts": (lambda: partition({"matrices": sophia(0.1), "rest": adamw(0.1)}, kind), EVERY),
    "clipped": (
        lambda: chain(scale_by_sophia(gamma=0.5), clip_by_global_norm(0.5), descend(0.1)),
        EVERY,
    ),
    "clipped in each": (
        lambda: chain(scale_by_adahessian(), clip_by_global_norm(0.5), descend(0.1)),
        1,
    ),
    "frozen": (
        lambda: chain(freeze(with_shape(lambda shape: shape == (4, 4))), adahessian(0.1)),
        1,
    ),
}
FORMS = ("parameters", "names")


def named() -> dict[str, Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def step_at(
    optimizer: TorchOptimizer, params: Mapping[str, Tensor], step: int, every: int, form: str
) -> None:
    """Make one step with the inputs that the pure update gets."""
    for name, grad in grads_at(step, missing=HOLES).items():
        params[name].grad = grad
    extra: dict[str, Any] = dict(given_at(step, every))
    for name, tree in extra.items():
        by_param = {params[key]: one for key, one in tree.items()}
        extra[name] = by_param if form == "parameters" else tree
    optimizer.step(extra=extra)


@each(name=list(CHOSEN), form=FORMS, executor=["reference", "blocked"])
def test_it_is_the_optimizer_itself(name: str, form: str, executor: Any) -> None:
    """TorchOptimizer equals the pure update with missing gradients, parts and frozen leaves."""
    make, every = CHOSEN[name]
    params = named()
    optimizer = TorchOptimizer(params.items(), make().using(executor=executor))
    for step in range(STEPS):
        step_at(optimizer, params, step, every, form)
    want, state = run_given(make(), every=every, missing=HOLES)
    assert_same({one: param.detach() for one, param in params.items()}, want)
    for one, param in params.items():
        kept = optimizer.state[param]
        assert "hessian" not in kept
        if kept:
            assert int(kept["step"]) == int(state.leaves[one].step)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_checkpoint_goes_on_in_the_middle(name: str) -> None:
    make, every = CHOSEN[name]
    params = named()
    optimizer = TorchOptimizer(params.items(), make())
    for step in range(STEPS):
        step_at(optimizer, params, step, every, "names")
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        params = {one: param.detach().clone().requires_grad_() for one, param in params.items()}
        optimizer = TorchOptimizer(params.items(), make())
        optimizer.load_state_dict(torch.load(file))
    want, _ = run_given(make(), every=every, missing=HOLES)
    assert_same({one: param.detach() for one, param in params.items()}, want)


def test_steps_without_it_are_planned_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without the input use plans; a step with it does not use those plans."""
    params = named()
    optimizer = TorchOptimizer(params.items(), sophia(0.1, gamma=0.5))
    planned: list[int] = []
    before = StepPlan.prepare

    def noted(self: StepPlan, *given: Any, **options: Any) -> Any:
        planned.append(step)
        return before(self, *given, **options)

    monkeypatch.setattr(StepPlan, "prepare", noted)
    own: Any = params_of()
    alone = sophia(0.1, gamma=0.5).using(executor="reference")  # the reference makes no plan
    state = alone.init(own)
    for step in range(12):
        extra: Any = given_at(step, 4)
        grads = grads_at(step)
        for name, grad in grads.items():
            params[name].grad = grad
        optimizer.step(extra=extra)
        own, state = alone.update(own, grads, state, extra=extra)
    assert set(planned) == {1, 2, 3, 5, 6, 7, 9, 10, 11}  # without the inputs of steps 0, 4, 8
    assert_same({one: param.detach() for one, param in params.items()}, own)


def test_groups_have_their_own_numbers_and_a_parameter_may_join() -> None:
    first, second = normal(3).requires_grad_(), normal(2, 2, seed=1).requires_grad_()
    optimizer = TorchOptimizer([first], sophia(0.1, (0.0, 0.0), 1.0, weight_decay=0.0))
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    for one in (first, second):
        one.grad = torch.ones_like(one)
    starts = [one.detach().clone() for one in (first, second)]
    optimizer.step(extra={"hessian": {one: torch.full_like(one, 2.0) for one in (first, second)}})
    for one, start, lr in zip((first, second), starts, (0.1, 0.5), strict=True):
        torch.testing.assert_close(one.detach(), start - lr / 2)


def test_what_hutchinson_estimates_by_name() -> None:
    model = torch.nn.Linear(3, 1)
    data = normal(8, 3)

    def loss(params: Any) -> Tensor:
        out: Tensor = torch.func.functional_call(model, params, (data,))
        return out.square().mean()

    named = dict(model.named_parameters())
    optimizer = TorchOptimizer(named.items(), adahessian(0.1))
    losses = []
    for _ in range(12):
        losses.append(loss(named).item())
        grads, hessian = hutchinson(loss, named)
        for name, grad in grads.items():
            named[name].grad = grad
        optimizer.step(extra={"hessian": hessian})
    assert losses[-1] < losses[0] / 4


def test_what_is_no_mapping_of_its_parameters() -> None:
    params = named()
    weight, other = params["scale"], torch.ones(())
    optimizer = TorchOptimizer(params.items(), sophia())
    unnamed = TorchOptimizer([torch.ones(2, requires_grad=True)], sophia())
    for name, (one, given, error, match) in {
        "a list": (optimizer, [torch.ones(())], TypeError, r"mapping by parameter.*dict\(zip"),
        "a stranger": (optimizer, {other: other}, ValueError, "is no parameter of this optimizer"),
        "a wrong name": (optimizer, {"sale": other}, ValueError, r"'sale' is no .*: 'body.weight'"),
        "twice": (optimizer, {weight: other, "scale": other}, ValueError, "'scale' is given twice"),
        "no names": (unnamed, {"0": torch.ones(2)}, ValueError, "given none .see named_parameters"),
        "a place": (unnamed, {(0, 0): torch.ones(2)}, ValueError, "is no parameter of"),
        "missing": (optimizer, {weight: other}, ValueError, "no tensor for 'body.weight', which"),
        "shape": (optimizer, {weight: torch.ones(1)}, ValueError, r"at 'scale' has shape \(1,\)"),
        "unknown": (optimizer, None, TypeError, "no stage takes the input 'hesian'"),
    }.items():
        for group in one.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        before = copy.deepcopy((params, one.state_dict()["state"]))
        with case(given=name), pytest.raises(error, match=match):
            one.step(extra={"hesian": 1.0} if given is None else {"hessian": given})
        assert_same((params, one.state_dict()["state"]), before)


def test_a_required_one_is_asked_for_at_each_step() -> None:
    """A missing input raises in planned steps too, but not while a gate is closed."""
    params = named()
    optimizer = TorchOptimizer(params.items(), chain(accumulate(2), adahessian(0.1)))
    for step in range(4):
        for name, grad in grads_at(step).items():
            params[name].grad = grad
        if step % 2:
            with pytest.raises(TypeError, match="scale_by_adahessian needs 'hessian' of each"):
                optimizer.step()
        optimizer.step(extra=given_at(step) if step % 2 else {})
    assert int(optimizer.state[params["scale"]]["step"]) == 2
