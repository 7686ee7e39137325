"""Derivatives and torch.func: where a step is followed, it is not made in place."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from functional_optim import NoState, Rule, Transform, chain, clip_by_global_norm, sgd

from .rules import RULES, VARIANTS
from .support import assert_same, noise

EXECUTORS = ["blocked", "auto", "compile", "fused"]
OPTIMIZER = VARIANTS["adamw"]
COUNT = 40_000
"""Elements that a compiler would be started for, if the step were not followed."""


def loss(executor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum of parameters after two steps, as a function of the first and of the gradient."""
    optimizer = OPTIMIZER.using(executor=executor)

    def function(param: Tensor, grad: Tensor) -> Tensor:
        state = optimizer.init(param.detach())
        for _ in range(2):
            param, state = optimizer.update(param, grad * param, state)
        return (param * param).sum()

    return function


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("count", [5, COUNT])
def test_autograd_sees_through(executor: Any, count: int) -> None:
    found = []
    for name in ("reference", executor):
        param, grad = noise(0, count).requires_grad_(), noise(1, count).requires_grad_()
        found.append(torch.autograd.grad(loss(name)(param, grad), (param, grad)))
    assert_same(found[1], found[0])


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "jacrev": torch.func.jacrev,
    "vmap": torch.func.vmap,
    "vmap over some": lambda f: torch.func.vmap(f, in_dims=(None, 0)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "jvp": lambda f: lambda p, g: torch.func.jvp(f, (p, g), (g, p)),
    "grad of grad": lambda f: torch.func.grad(lambda p, g: torch.func.grad(f)(p, g).sum()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own call
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_sees_through(transform: str, executor: Any) -> None:
    param, grad = noise(0, 4, 5), noise(1, 4, 5)
    got, want = (TRANSFORMS[transform](loss(name))(param, grad) for name in (executor, "reference"))
    assert_same(got, want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own call
@pytest.mark.parametrize("executor", EXECUTORS)
def test_forward_mode_sees_through(executor: Any) -> None:
    def tangent(name: Any) -> Tensor:
        with forward_ad.dual_level():
            param = forward_ad.make_dual(noise(0, 6), noise(2, 6))
            made = loss(name)(param, noise(1, 6))
            return forward_ad.unpack_dual(made).tangent

    assert tangent("reference") is not None
    assert_same(tangent(executor), tangent("reference"))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_number_that_is_followed(executor: Any) -> None:
    def derivative(name: Any) -> tuple[Tensor, ...]:
        lr = torch.tensor(0.1, requires_grad=True)
        beta = torch.tensor(0.5, requires_grad=True)
        optimizer = VARIANTS["lion"].replace(lr=lr, betas=(beta, 0.9)).using(executor=name)
        optimizer = optimizer if name != "fused" else optimizer.using(executor="auto")
        param, state = noise(0, 6), None
        state = optimizer.init(param)
        for step in range(2):
            param, state = optimizer.update(param, noise(step, 6), state)
        return torch.autograd.grad((param * param).sum(), (lr, beta), allow_unused=True)

    got, want = derivative(executor), derivative("reference")
    assert want[0] is not None
    assert_same(got, want)


class Pair(NamedTuple):
    weights: tuple[float, float]


def pair_rule(param: Tensor, grad: Tensor, state: NoState, c: Pair) -> tuple[Tensor, NoState]:
    return param * c.weights[0] - grad * c.weights[1], state


PAIR = chain(Rule(name="pair", hyper=Pair, rule=pair_rule)(weights=(0.5, 0.25)))


@pytest.mark.parametrize("executor", EXECUTORS[:3])
def test_a_number_in_a_tuple_that_is_followed(executor: Any) -> None:
    def derivative(name: Any) -> Tensor:
        weight = torch.tensor(0.5, requires_grad=True)
        optimizer = PAIR.replace(weights=(0.75, weight)).using(executor=name)
        param = noise(0, 6)
        after, _ = optimizer.update(param, noise(1, 6), optimizer.init(param))
        return torch.autograd.grad(after.sum(), weight)[0]

    assert_same(derivative(executor), derivative("reference"))


@pytest.mark.parametrize("executor", EXECUTORS[:3])
def test_a_total_that_is_followed(executor: Any) -> None:
    def derivative(name: Any) -> Tensor:
        total = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
        optimizer = chain(clip_by_global_norm(1.0), sgd(0.5)).using(executor=name)
        param = noise(0, 6)
        after, _ = optimizer.update(param, noise(1, 6), optimizer.init(param), measured=[total])
        return torch.autograd.grad(after.sum(), total)[0]

    assert_same(derivative(executor), derivative("reference"))


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto", "fused"])
@pytest.mark.parametrize("count", [5, 70_001])
def test_parameters_that_require_gradients_are_stepped_in_place(executor: Any, count: int) -> None:
    optimizer = OPTIMIZER.using(executor=executor)
    param = torch.nn.Parameter(noise(0, count))
    (param * noise(1, count)).sum().backward()
    state = optimizer.init(param)
    with torch.no_grad():
        want, _ = optimizer.update(param, param.grad, optimizer.init(param))
    assert not want.requires_grad
    optimizer.update_(param, param.grad, state)
    assert_same(param.detach(), want)
    assert param.is_leaf and param.requires_grad and param.grad_fn is None
    assert not any(t.requires_grad for t in (state.leaves.stages[-1].exp_avg,))


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto", "fused"])
def test_a_backward_pass_after_a_step_notices_it(executor: Any) -> None:
    for count in (5, 70_001):
        param = torch.nn.Parameter(noise(0, count))
        optimizer = OPTIMIZER.using(executor=executor)
        state = optimizer.init(param)
        late = (param * param).sum()
        optimizer.update_(param, torch.ones(count), state)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto", "fused"])
def test_inference_mode_and_back(executor: Any) -> None:
    optimizer = OPTIMIZER.using(executor=executor)
    grads = {"w": noise(2, 6), "v": noise(3, 4)}
    results: list[Any] = []

    def work(first: AbstractContextManager[Any]) -> None:
        params = {"w": noise(0, 6), "v": noise(1, 4)}
        state = optimizer.init(params)
        with first:
            optimizer.update_(params, grads, state)
        optimizer.update_(params, grads, state)
        results.append((params, state))

    for first in (torch.inference_mode(), nullcontext()):
        thread = threading.Thread(target=work, args=(first,))  # with scratch of its own
        thread.start()
        thread.join()
    assert_same(*results)


@pytest.mark.parametrize("executor", ["reference", "script", "blocked", "auto", "fused"])
def test_bound_in_inference_mode_and_back(executor: Any) -> None:
    optimizer = OPTIMIZER.using(executor=executor)
    grads = [{"w": noise(2, 6), "v": noise(3, 4)}, {"w": noise(4, 6), "v": None}]
    params, other = ({"w": noise(0, 6), "v": noise(1, 4)} for _ in range(2))
    with torch.inference_mode():
        bound = optimizer.bind(params)
        bound.step(grads[0])
    bound.step(grads[1])
    with torch.inference_mode():
        bound.step(grads[1])
        bound.step(grads[0])
    bound.step(grads[0])
    want = optimizer.bind(other)
    for k in (0, 1, 1, 0, 0):
        want.step(grads[k])
    assert_same((params, bound.state), (other, want.state))


def scaled(grad: Tensor, param: Tensor, state: NoState, c: Any) -> tuple[Tensor, NoState]:
    return grad * c.weights[0], state


def test_one_followed_leaf_is_enough() -> None:
    transform = Transform(name="scaled", hyper=Pair, transform=scaled)
    optimizer = chain(transform(weights=(2.0, 0.0)), RULES["reuses"])
    params = {"a": noise(0, 3), "b": noise(1, 3).requires_grad_()}
    grads = {"a": noise(2, 3), "b": noise(3, 3)}
    state = optimizer.init(params)
    for executor in ("blocked", "auto"):
        after, _ = replace(optimizer, executor=executor).update(params, grads, state)
        assert after["b"].grad_fn is not None
        assert after["a"].grad_fn is None
