"""``stored`` over chains: names, schedules, overrides, copies, front-ends, and refusals."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    ema,
    mars,
    sam,
    sgd,
    trace,
)
from functional_optim.storage import stored

from ..choices import case
from ..tensors import assert_same, normal
from .support import BASES, CHOICES, made, steps


def long() -> Optimizer:
    return chain(
        clip_by_value(3.0),
        clip_by_global_norm(1.0),
        clip_by_value(2.0),
        adamw(lr=0.1, weight_decay=0.2),
    )


def master(optimizer: Optimizer) -> Optimizer:
    return stored(optimizer, param="bfloat16+master")


def follows(optimizer: Optimizer, made: Optimizer, count: int = 4, **hyper: Any) -> None:
    """Check that the master equals the float32 run, so that wrong hyper-parameters show."""
    param = {"a": normal(10).bfloat16(), "b": normal(3, seed=9).bfloat16()}
    grads = [
        {name: normal(*t.shape, seed=step).bfloat16() for name, t in param.items()}
        for step in range(count)
    ]
    _, state = steps(made, param, grads, **hyper)
    float_grads = [{name: t.float() for name, t in one.items()} for one in grads]
    wide = {name: t.float() for name, t in param.items()}
    want, _ = steps(optimizer, wide, float_grads, **hyper)
    assert_same({name: leaf.stages[-1].master for name, leaf in state.leaves.items()}, want)


def test_hyper_parameters_keep_their_names_and_values() -> None:
    assert master(long()).hyper == long().hyper
    assert "clip_by_value_2.clip_value" in long().hyper


def test_replace_and_update_take_them() -> None:
    hypers: list[dict[str, Any]] = [
        {"lr": 0.3},
        {"betas": (0.5, 0.7)},
        {"weight_decay": 0.0},
        {"clip_by_value_2.clip_value": 0.01},
        {"clip_by_value.clip_value": 0.5, "max_norm": 100.0},
        {"amsgrad": False},
        {"maximize": True},
    ]
    for hyper in hypers:
        with case(**hyper):
            follows(long().replace(**hyper), master(long()).replace(**hyper))
            follows(long(), master(long()), **hyper)
            assert master(long()).replace(**hyper) == master(long().replace(**hyper))


def test_what_the_chain_refuses_is_refused() -> None:
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"lr": -1.0}, ValueError),
        ({"betas": (1.0, 0.5)}, ValueError),
        ({"max_norm": float("nan")}, ValueError),
        ({"momentum": 0.5}, TypeError),
        ({"amsgrad": 1}, TypeError),
    ]
    for hyper, error in refused:
        for optimizer in (long(), master(long())):
            with case(**hyper), pytest.raises(error):
                optimizer.replace(**hyper)


def test_contradictions_are_refused() -> None:
    made = master(sgd(momentum=0.9, nesterov=True))
    with pytest.raises(ValueError, match="nesterov needs momentum"):
        made.replace(dampening=0.5)


def test_schedules_and_tensors() -> None:
    def halved(made: float) -> float:
        return 0.1 / 2**made

    follows(adamw(lr=halved), master(adamw(lr=halved)))
    rate = torch.tensor(0.05, dtype=torch.float64)
    follows(adamw(lr=rate), master(adamw(lr=rate)))


def test_overrides_before_and_after() -> None:
    where = ("a",)
    plain = long().override(where, **{"clip_by_value_2.clip_value": 0.01, "lr": 0.01})
    plain = plain.override(lambda path: path == ("b",), weight_decay=0.0, max_norm=0.1)
    follows(plain, master(plain))
    after = master(long()).override(where, **{"clip_by_value_2.clip_value": 0.01, "lr": 0.01})
    after = after.override(lambda path: path == ("b",), weight_decay=0.0, max_norm=0.1)
    follows(plain, after)
    assert plain.hypers_at(("a",)) != plain.hypers_at(("b",))


def test_more_can_be_chained_in_front() -> None:
    made = chain(clip_by_value(0.5), stored(sgd(lr=1.0, maximize=True), state="bfloat16"))
    param = made.update(torch.zeros(1), torch.ones(1), made.init(torch.zeros(1)))[0]
    assert float(param) == 0.5
    assert made.stages[0].name == "stored_maximize"


def test_equal_hashable_and_picklable() -> None:
    for name, (base, arguments) in CHOICES.items():
        with case(name=name):
            (one, dtype), (two, _) = made(name), made(name)
            assert one == two and hash(one) == hash(two)
            assert one.stages == two.stages and hash(one.stages) == hash(two.stages)
            for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
                assert other == one and other.stages == one.stages and other.hyper == one.hyper
            assert one != stored(BASES[base](), **{**arguments, "seed": 99})
            state = one.init(normal(300).to(dtype))
            assert_same(pickle.loads(pickle.dumps(state)), state)


def test_the_torch_front_end_steps_it() -> None:
    optimizer = stored(long(), param="bfloat16+kahan", state={"exp_avg": "int8"})
    pure = optimizer.override(("b",), lr=0.01, weight_decay=0.0)
    want = {"a": normal(20).bfloat16(), "b": normal(5, seed=1).bfloat16()}
    a, b = (param.clone().requires_grad_() for param in want.values())
    front = TorchOptimizer(
        [{"params": [a]}, {"params": [b], "lr": 0.01, "weight_decay": 0.0}], optimizer
    )
    state = pure.init(want)
    for step in range(3):
        grads = {"a": normal(20, seed=step).bfloat16(), "b": normal(5, seed=step + 9).bfloat16()}
        a.grad, b.grad = grads.values()
        front.step()
        want, state = pure.update(want, grads, state)
    assert_same({"a": a.detach(), "b": b.detach()}, want)
    assert front.state[a]["exp_avg"].dtype == torch.uint8


def test_it_is_shown_as_it_was_made() -> None:
    inner = chain(clip_by_global_norm(1.0), sgd(lr=0.1, momentum=0.9))
    kept = stored(inner, param="bfloat16+kahan", state="int8", seed=3)
    told = "param='bfloat16+kahan', seed=3, state={'momentum_buffer': 'int8'}"
    assert repr(kept) == f"stored({inner!r}, {told})"
    assert str(kept.replace(lr=0.2)) == f"stored({inner.replace(lr=0.2)!r}, {told})"
    behind = chain(kept, ema(0.9))
    assert repr(behind) == f"chain({kept!r}, ema(decay=0.9))"
    assert repr(kept.using(executor="blocked")).endswith(").using(executor='blocked')")


VIEWED: dict[str, dict[str, Any]] = {
    "bfloat16 state": {"state": "bfloat16"},
    "int8 average": {"state": {"average": "int8"}},
    "master": {"param": "bfloat16+master"},
    "kahan": {"param": "bfloat16+kahan"},
}


@pytest.mark.parametrize("name", VIEWED)
def test_an_average_that_is_stored_is_what_one_evaluates_with(name: str) -> None:
    """The view is close to that of a float32 run, whose parameters are far from their average."""
    plain = chain(sgd(lr=0.5, momentum=0.9), ema(0.9))
    kept = stored(plain, **VIEWED[name])
    dtype = torch.bfloat16 if "param" in VIEWED[name] else torch.float32
    start = normal(300).to(dtype)
    model = torch.nn.ParameterDict({"w": start.clone()})
    front = TorchOptimizer(model.named_parameters(), kept)
    params, state = start, kept.init(start)
    wide, own = start.float(), plain.init(start.float())
    for _ in range(4):
        grad = torch.ones(300, dtype=dtype)
        params, state = kept.update(params, grad, state)
        wide, own = plain.update(wide, grad.float(), own)
        model["w"].grad = grad
        front.step()
    seen, want = kept.view(params, state), plain.view(wide, own)
    assert seen.dtype == dtype
    assert float((want - wide).abs().min()) > 1
    room = 0.4 if "int8" in name else 0.05  # four roundings, each to 1/16 of a value
    torch.testing.assert_close(seen.float(), want, rtol=0.02, atol=room)
    with front.averaged(model):
        assert_same(model["w"].detach(), seen)


@pytest.mark.parametrize("param", ["bfloat16", "bfloat16+master", "bfloat16+kahan"])
def test_a_stored_optimizer_behind_other_stages_is_handed_their_gradient(param: str) -> None:
    """The outer state has the parameter's dtype. The mean of equal gradients is exact."""
    inner = stored(adamw(lr=0.1, maximize=True), param=param)
    start, grads = normal(30).bfloat16(), [normal(30, seed=k).bfloat16() for k in range(3)]
    twice = chain(accumulate(2), inner)
    params, state = start, twice.init(start)
    want, own = start, inner.init(start)
    for grad in grads:
        for _ in range(2):
            params, state = twice.update(params, grad, state)
        want, own = inner.update(want, grad, own)
    assert_same(params, want)
    weight = torch.nn.Parameter(start.clone())
    for first in (sam(0.1), mars()):
        front = TorchOptimizer([weight], chain(first, inner))
        for grad in grads:
            weight.grad = grad
            front.step()
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize("param", ["float32", "bfloat16", "bfloat16+master"])
@pytest.mark.parametrize("place", ["before", "after", "gate", "same names"])
def test_state_dicts_of_a_chain_that_is_stored_in_part(place: str, param: str) -> None:
    inner = stored(adamw(lr=0.1), state="int8", param=param)
    optimizer = {
        "before": chain(clip_by_global_norm(0.1), trace(0.9), inner),
        "after": chain(inner, ema(0.9)),
        "gate": chain(accumulate(2), inner),
        "same names": chain(
            trace(0.9), stored(sgd(lr=0.1, momentum=0.8), state="int8", param=param)
        ),
    }[place]
    dtype = torch.float32 if param == "float32" else torch.bfloat16

    def trained(front_end: TorchOptimizer, steps: range) -> list[torch.Tensor]:
        (weight,) = front_end.param_groups[0]["params"]
        for step in steps:
            weight.grad = normal(300, seed=step).to(dtype)
            front_end.step()
        entries = front_end.state_dict()["state"][0]
        return [weight.detach().clone(), *(one.clone() for one in entries.values())]

    first = TorchOptimizer([nn.Parameter(normal(300).to(dtype))], optimizer)
    trained(first, range(3))
    saved = copy.deepcopy((first.param_groups[0]["params"][0].detach(), first.state_dict()))
    second = TorchOptimizer([nn.Parameter(saved[0])], optimizer)
    second.load_state_dict(saved[1])
    for one, other in zip(trained(first, range(3, 6)), trained(second, range(3, 6)), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
