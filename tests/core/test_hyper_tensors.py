"""Hyper-parameters as 0-d tensors: to differentiate, and to try several at once by vmap."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    rprop,
    sgd,
    weight_decay,
)

from ..choices import case
from . import support
from .support import assert_same, noise, step, tensors

EVERY = {
    **support.EVERY,
    "clipped by value": chain(clip_by_value(0.5), weight_decay(0.1), sgd(0.1)),
}
PARAM = noise(0, 3)
GRADS = [3 * noise(index + 1, 3) for index in range(3)]


def _run(optimizer: Optimizer, **hyper: Any) -> Tensor:
    """Three steps from a fresh state, in double precision."""
    param, state = PARAM, optimizer.init(PARAM)
    for grad in GRADS:
        param, state = optimizer.update(param, grad, state, **hyper)
    return param


def _numbers(optimizer: Optimizer) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Every number but 0 among the hyper-parameters, and what sets it, times a factor."""
    for name, value in optimizer.hyper.items():
        if isinstance(value, float) and value != 0.0:
            yield name, lambda factor, n=name, v=value: {n: factor * v}
        if isinstance(value, tuple):
            first, second = value
            yield f"{name}[0]", lambda f, n=name, a=first, b=second: {n: (f * a, b)}
            yield f"{name}[1]", lambda f, n=name, a=first, b=second: {n: (a, f * b)}


CASES = [
    (name, hyper, setting)
    for name, optimizer in EVERY.items()
    for hyper, setting in _numbers(optimizer)
]


def test_vmap_over_any_number_equals_the_loop() -> None:
    """And without torch's warning that it runs the members one by one."""
    for name, hyper, setting in CASES:
        factors = [1.0, 1.5] if hyper == "etas[1]" else [0.5, 0.9]

        def run(factor: Any, name: str = name, setting: Any = setting) -> Tensor:
            return _run(EVERY[name], **setting(factor))

        with case(name=name, hyper=hyper):
            batched = torch.vmap(run)(torch.tensor(factors, dtype=torch.float64))
            loop = torch.stack(list(map(run, factors)))
            torch.testing.assert_close(batched, loop, rtol=1e-13, atol=1e-14)


def test_grad_by_any_number_equals_finite_differences() -> None:
    weights, width = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), 1e-5
    for name, hyper, setting in CASES:

        def value(factor: Any, name: str = name, setting: Any = setting) -> Any:
            return (weights * _run(EVERY[name], **setting(factor))).sum()

        at = 0.95 if hyper != "etas[1]" else 1.05
        with case(name=name, hyper=hyper):
            slope = torch.func.grad(value)(torch.tensor(at, dtype=torch.float64))
            difference = (value(at + width) - value(at - width)) / (2 * width)
            torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-8)


def test_the_numbers_matter_in_these_runs() -> None:
    """The comparisons above are not of constants, but for what init uses and limits not met."""
    still = {
        hyper
        for name, hyper, setting in CASES
        if torch.equal(
            _run(EVERY[name]),
            _run(EVERY[name], **setting(1.1 if hyper == "etas[1]" else 0.9)),
        )
        and not (name == "lion" or name.startswith("rule before"))  # a sign hides small changes
    }
    assert still == {"initial_accumulator_value", "lr", "step_sizes[0]", "step_sizes[1]"}


def test_derivatives_by_lr_in_closed_form() -> None:
    """Also where it is used by init, and then goes through init."""
    one, grad = torch.ones(2), torch.tensor([3.0, -2.0])
    slope = torch.func.grad(lambda lr: step(sgd(lr), one, grad).sum())(torch.tensor(0.1))
    assert slope.item() == -1.0
    slope = torch.func.grad(lambda lr: step(rprop(lr), one, one).sum())(torch.tensor(0.1))
    assert slope.item() == -2.0


def test_the_graph_reaches_a_tensor_of_one_element() -> None:
    rate = torch.tensor([0.1], requires_grad=True)
    step(adamw(rate), torch.ones(2), torch.ones(2)).sum().backward()
    assert rate.grad is not None
    assert rate.grad.shape == (1,)
    torch.testing.assert_close(rate.grad, torch.tensor([2 * (-0.01 - 1.0)]), rtol=1e-6, atol=0)


def test_one_element_of_any_shape_and_dtype_is_a_number() -> None:
    expected = step(adam(1.0), PARAM, GRADS[0])
    for shape in ((1,), (1, 1), ()):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            new = step(adam(torch.full(shape, 1.0).to(dtype)), PARAM, GRADS[0])
            with case(shape=shape, dtype=dtype):
                torch.testing.assert_close(new, expected, rtol=1e-14, atol=1e-15)


def test_no_tensor_makes_a_dtype_drift() -> None:
    """0-d parameters are where torch's promotion rules would let a double-precision number in."""
    for name, optimizer in EVERY.items():
        setting = {
            key: torch.tensor(value, dtype=torch.float64)
            for key, value in optimizer.hyper.items()
            if isinstance(value, float) and value != 0.0
        }
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            params, grads = ([noise(s, dtype=dtype), noise(s, 3, dtype=dtype)] for s in (0, 1))
            state = optimizer.init(params)
            with case(name=name, dtype=dtype):
                new, new_state = optimizer.update(params, grads, state, **setting)
                kinds = [[t.dtype for t in tensors(s.leaves)] for s in (state, new_state)]
                assert kinds[0] == kinds[1]
                assert {one.dtype for one in new} == {dtype}
                optimizer.update_(params, grads, state, **setting)
                assert_same((params, state), (new, new_state))


def test_two_links_share_a_tensor_lr() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = chain(clip_by_global_norm(1e9), decoupled_weight_decay(0.5), sgd(rate))
    assert step(optimizer, torch.ones(1), torch.ones(1)).item() == 0.25
