"""Gradients that share memory with parameters: a step reads all gradients before it writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    partition,
    sgd,
)
from functional_optim.testing.inputs import fed
from tests.cases import CASES, CHAINS, INPUT_CASES
from tests.choices import case

Params = dict[str, Tensor]
TABLE = {**CASES, **CHAINS, **INPUT_CASES}
STEPS = 3  # the first step builds the plan, the third reuses it

GRADIENTS: dict[str, Callable[[Params], Params]] = {
    "each other's parameter": lambda p: {"a": p["b"], "b": p["a"], "c": p["a"]},
    "its own parameter": dict,
    "a view": lambda p: {"a": p["c"].t(), "b": p["a"].detach(), "c": p["b"][:]},
    "one element": lambda p: {"a": p["b"][:1, :1].expand(4, 4), "b": p["a"], "c": p["c"]},
}


def params_of() -> Params:
    generator = torch.Generator().manual_seed(45)
    return {name: torch.randn(4, 4, generator=generator) for name in "abc"}


def wanted(optimizer: Optimizer, gradients: Callable[[Params], Params]) -> Params:
    """Return the parameters after pure steps, which write to no input."""
    params, state = params_of(), optimizer.init(params_of())
    for _ in range(STEPS):
        params, state = optimizer.update(params, gradients(params), state)
    return params


def in_place(optimizer: Optimizer, gradients: Callable[[Params], Params]) -> Params:
    params = params_of()
    state = optimizer.init(params)
    for _ in range(STEPS):
        optimizer.update_(params, gradients(params), state)
    return params


def bound(optimizer: Optimizer, gradients: Callable[[Params], Params]) -> Params:
    params = params_of()
    made = optimizer.bind(params)
    for _ in range(STEPS):
        made.step(gradients(params))
    return params


def in_torch_s_class(optimizer: Optimizer, gradients: Callable[[Params], Params]) -> Params:
    params = {name: one.requires_grad_() for name, one in params_of().items()}
    made = TorchOptimizer(params.items(), optimizer)
    for _ in range(STEPS):
        for name, grad in gradients(params).items():
            params[name].grad = grad.detach()
        made.step()
    return {name: one.detach() for name, one in params.items()}


def over_threads(optimizer: Optimizer, gradients: Callable[[Params], Params]) -> Params:
    params = params_of()
    workers = {"a": "first", "b": "second", "c": "third"}
    made = DistributedOptimizer.over_threads(optimizer, params, workers)
    for _ in range(STEPS):
        made.step(gradients(params))
    made.close()
    return params


def of_parts(path: Any, _: Any) -> str:
    return "first" if path[0] == "a" else "rest"


ONE_CHAIN = {
    "plain": adamw(0.1),
    "measured": chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9)),
}
COMPOSED = {
    "parts": partition({"first": sgd(0.1), "rest": adamw(0.1)}, of_parts),
    "behind a gate": chain(accumulate(2), sgd(0.1), ema(0.9)),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_every_door_reads_all_gradients_first(kind: str) -> None:
    """In every front-end, steps in place match pure steps if gradients alias parameters.

    This test found fault 45: a step wrote to a parameter before it read all gradients.
    """
    gradients = GRADIENTS[kind]
    for name, chosen in {**ONE_CHAIN, **COMPOSED}.items():
        doors = [in_place, in_torch_s_class, over_threads] + [bound] * (name in ONE_CHAIN)
        for executor in ("reference", "blocked", "auto"):
            optimizer = chosen.using(executor=executor)
            want = wanted(chosen.using(executor="reference"), gradients)
            for door in doors:
                with case(name=name, executor=executor, door=door.__name__):
                    found = door(optimizer, gradients)
                    assert all(torch.equal(found[key], want[key]) for key in want)


@pytest.mark.parametrize("name", TABLE)
def test_every_optimizer_steps_in_place_as_it_does_purely(name: str) -> None:
    """Every optimizer steps aliased gradients in place as it does purely (fault 45)."""
    optimizer = fed(TABLE[name].factory())
    gradients = GRADIENTS["each other's parameter"]
    want, found = wanted(optimizer, gradients), in_place(optimizer, gradients)
    assert all(torch.equal(found[key], want[key]) for key in want)


def test_a_gradient_may_be_another_s_state() -> None:
    """A gradient may share memory with the state of another parameter (fault 45)."""
    optimizer = sgd(0.1, momentum=0.9)
    params = params_of()
    state = optimizer.init(params)
    optimizer.update_(params, params_of(), state)
    buffers = [state.leaves[name].stages[-1].momentum_buffer[0] for name in "cab"]
    grads = dict(zip("abc", buffers, strict=True))
    want, _ = optimizer.using(executor="reference").update(params, grads, state)
    optimizer.update_(params, grads, state)
    assert all(torch.equal(params[key], want[key]) for key in want)
