"""Derivatives and torch.func: a differentiated step is not made in place."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from functional_optim import (
    NoState,
    Rule,
    Transform,
    chain,
    clip_by_global_norm,
    scale_by_adam,
    sgd,
)

from ...choices import case, pairs
from ..rules import RULES, VARIANTS
from ..support import LARGE, assert_same, copied, noise, together

pytestmark = pytest.mark.usefixtures("near_borders")
FOLLOWED = ("blocked", "auto", "compiled")
"""Executors, none of which compiles a differentiated step."""
OPTIMIZER = VARIANTS["adamw"]


def loss(executor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of parameter and gradient: the sum of squares after two steps."""
    optimizer = OPTIMIZER.using(executor=executor)

    def function(param: Tensor, grad: Tensor) -> Tensor:
        state = optimizer.init(param.detach())
        for _ in range(2):
            param, state = optimizer.update(param, grad * param, state)
        return (param * param).sum()

    return function


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "jacrev": torch.func.jacrev,
    "vmap": torch.func.vmap,
    "vmap over some": lambda f: torch.func.vmap(f, in_dims=(None, 0)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "jvp": lambda f: lambda p, g: torch.func.jvp(f, (p, g), (g, p)),
    "grad of grad": lambda f: torch.func.grad(lambda p, g: torch.func.grad(f)(p, g).sum()),
}


def test_autograd_sees_through() -> None:
    for one in pairs(executor=FOLLOWED, count=[5, LARGE]):
        found = []
        for name in ("reference", one["executor"]):
            param, grad = (noise(k, one["count"]).requires_grad_() for k in range(2))
            found.append(torch.autograd.grad(loss(name)(param, grad), (param, grad)))
        with case(**one):
            assert_same(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own call
def test_torch_func_sees_through() -> None:
    param, grad = noise(0, 4, 5), noise(1, 4, 5)
    for transform, function in TRANSFORMS.items():
        want = function(loss("reference"))(param, grad)
        for executor in FOLLOWED:
            with case(transform=transform, executor=executor):
                assert_same(function(loss(executor))(param, grad), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own call
def test_forward_mode_sees_through() -> None:
    def tangent(name: Any) -> Tensor:
        with forward_ad.dual_level():
            param = forward_ad.make_dual(noise(0, 6), noise(2, 6))
            return forward_ad.unpack_dual(loss(name)(param, noise(1, 6))).tangent

    assert tangent("reference") is not None
    for executor in FOLLOWED:
        with case(executor=executor):
            assert_same(tangent(executor), tangent("reference"))


class Pair(NamedTuple):
    weights: tuple[float, float]


def pair_rule(param: Tensor, grad: Tensor, state: NoState, c: Pair) -> tuple[Tensor, NoState]:
    return param * c.weights[0] - grad * c.weights[1], state


PAIR = chain(Rule(name="pair", hyper=Pair, rule=pair_rule)(weights=(0.5, 0.25)))


def of_numbers(name: Any) -> tuple[Tensor, ...]:
    lr, beta = (torch.tensor(value, requires_grad=True) for value in (0.1, 0.5))
    optimizer = VARIANTS["lion"].replace(lr=lr, betas=(beta, 0.9)).using(executor=name)
    param = noise(0, 6)
    state = optimizer.init(param)
    for step in range(2):
        param, state = optimizer.update(param, noise(step, 6), state)
    return torch.autograd.grad((param * param).sum(), (lr, beta), allow_unused=True)


def of_a_number_in_a_tuple(name: Any) -> tuple[Tensor, ...]:
    weight = torch.tensor(0.5, requires_grad=True)
    optimizer = PAIR.replace(weights=(0.75, weight)).using(executor=name)
    param = noise(0, 6)
    after, _ = optimizer.update(param, noise(1, 6), optimizer.init(param))
    return torch.autograd.grad(after.sum(), (weight,))


def of_a_total(name: Any) -> tuple[Tensor, ...]:
    total = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    optimizer = chain(clip_by_global_norm(1.0), sgd(0.5)).using(executor=name)
    param = noise(0, 6)
    after, _ = optimizer.update(param, noise(1, 6), optimizer.init(param), measured=[total])
    return torch.autograd.grad(after.sum(), (total,))


def test_numbers_and_totals_are_followed() -> None:
    for derivative in (of_numbers, of_a_number_in_a_tuple, of_a_total):
        want = derivative("reference")
        assert want[0] is not None
        for executor in FOLLOWED[:3]:
            with case(derivative=derivative, executor=executor):
                assert_same(derivative(executor), want)


def test_parameters_that_require_gradients_are_stepped_in_place(executors: Any) -> None:
    for one in pairs(executor=executors, count=[5, LARGE]):
        optimizer = OPTIMIZER.using(executor=one["executor"])
        param = torch.nn.Parameter(noise(0, one["count"]))
        (param * noise(1, one["count"])).sum().backward()
        state = optimizer.init(param)
        with torch.no_grad():
            want, _ = optimizer.update(param, param.grad, optimizer.init(param))
        optimizer.update_(param, param.grad, state)
        with case(**one):
            assert_same(param.detach(), want)
            assert not want.requires_grad and not state.leaves.stages[-1].exp_avg.requires_grad
            assert param.is_leaf and param.requires_grad and param.grad_fn is None


def test_inference_mode_and_back(executors: Any) -> None:
    """State and plans from one mode work in the other, in place and bound."""
    params = {"w": noise(0, 6), "v": noise(1, 4)}
    grads: list[Any] = [{"w": noise(2, 6), "v": noise(3, 4)}, {"w": noise(4, 6), "v": None}]

    def trained(optimizer: Any, modes: tuple[bool, ...]) -> Any:
        ours, theirs = copied((params, params))
        state = optimizer.init(ours)
        with torch.inference_mode(mode=modes[0]):
            bound = optimizer.bind(theirs)
        for k, mode in zip((0, 0, 0, 1, 1, 0, 0), modes, strict=True):
            with torch.inference_mode(mode=mode):
                optimizer.update_(ours, grads[k], state)
                bound.step(grads[k])
        return ours, state, theirs, bound.state

    for one in pairs(executor=executors, name=["adamw", "sgd nesterov"]):
        optimizer = VARIANTS[one["name"]].using(executor=one["executor"])
        # Each run uses a new thread, which has its own scratch.
        (found,) = together(
            lambda o=optimizer: trained(o, (True, True, False, False, True, True, False))
        )
        (want,) = together(lambda o=optimizer: trained(o, (False,) * 7))
        with case(**one):
            assert_same(found, want)


def scaled(grad: Tensor, param: Tensor, state: NoState, c: Any) -> tuple[Tensor, NoState]:
    return grad * c.weights[0], state


def test_one_followed_leaf_is_enough() -> None:
    transform = Transform(name="scaled", hyper=Pair, transform=scaled)
    optimizer = chain(transform(weights=(2.0, 0.0)), RULES["reuses"])
    params = {"a": noise(0, 3), "b": noise(1, 3).requires_grad_()}
    state = optimizer.init(params)
    for executor in FOLLOWED[:3]:
        other = optimizer.using(executor=executor)
        after, _ = other.update(params, {"a": noise(2, 3), "b": noise(3, 3)}, state)
        assert after["b"].grad_fn is not None
        assert after["a"].grad_fn is None


def test_a_derivative_through_a_norm_in_between_is_that_of_the_reference() -> None:
    optimizer = chain(scale_by_adam(), clip_by_global_norm(0.5), sgd(0.1))
    params = {"a": noise(0, 4, 4), "b": noise(1, 3)}
    state = optimizer.init(params)

    def derivatives(executor: str) -> tuple[Tensor, ...]:
        grads = {k: noise(2, *one.shape).requires_grad_() for k, one in params.items()}
        after, _ = optimizer.using(executor=executor).update(params, grads, state)
        total = sum((one * one).sum() for one in after.values())
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, [*grads.values()])

    want = derivatives("reference")
    for executor in FOLLOWED[:2]:
        with case(executor=executor):
            assert_same(derivatives(executor), want)
