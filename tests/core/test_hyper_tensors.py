"""Hyper-parameters as 0-d tensors: to differentiate, and to try several at once by vmap."""

from collections.abc import Callable
from typing import Any

import pytest
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

from .support import CHAINS, VARIANTS, assert_same, noise

EVERY = {
    **VARIANTS,
    **CHAINS,
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


def _numbers(optimizer: Optimizer) -> dict[str, Callable[[Any], Any]]:
    """Every number but 0 among the hyper-parameters: how to set it, times a factor."""
    found: dict[str, Callable[[Any], Any]] = {}
    for name, value in optimizer.hyper.items():
        if isinstance(value, float) and value != 0.0:
            found[name] = lambda factor, name=name, value=value: {name: factor * value}
        if isinstance(value, tuple):
            first, second = value
            found[f"{name}[0]"] = lambda f, n=name, a=first, b=second: {n: (f * a, b)}
            found[f"{name}[1]"] = lambda f, n=name, a=first, b=second: {n: (a, f * b)}
    return found


CASES = [(name, hyper) for name in EVERY for hyper in _numbers(EVERY[name])]


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_vmap_over_any_number_equals_the_loop(name: str, hyper: str) -> None:
    """And without torch's warning that it runs the members one by one."""
    optimizer, setting = EVERY[name], _numbers(EVERY[name])[hyper]
    factors = [1.0, 1.1, 1.5] if hyper == "etas[1]" else [0.5, 0.9, 1.0]
    batched = torch.vmap(lambda f: _run(optimizer, **setting(f)))(
        torch.tensor(factors, dtype=torch.float64)
    )
    loop = torch.stack([_run(optimizer, **setting(factor)) for factor in factors])
    torch.testing.assert_close(batched, loop, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_grad_by_any_number_equals_finite_differences(name: str, hyper: str) -> None:
    optimizer, setting = EVERY[name], _numbers(EVERY[name])[hyper]
    weights = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def value(factor: Any) -> Any:
        return (weights * _run(optimizer, **setting(factor))).sum()

    at, width = 0.95 if hyper != "etas[1]" else 1.05, 1e-5
    slope = torch.func.grad(value)(torch.tensor(at, dtype=torch.float64))
    difference = (value(at + width) - value(at - width)) / (2 * width)
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-8)


def test_the_numbers_matter_in_these_runs() -> None:
    """The comparisons above are not of constants, but for what init uses and limits not met."""
    still = {
        hyper
        for name, hyper in CASES
        if torch.equal(
            _run(EVERY[name]),
            _run(EVERY[name], **_numbers(EVERY[name])[hyper](1.1 if hyper == "etas[1]" else 0.9)),
        )
        and not (name == "lion" or name.startswith("rule before"))  # a sign hides small changes
    }
    assert still == {"initial_accumulator_value", "lr", "step_sizes[0]", "step_sizes[1]"}


def test_grad_of_one_sgd_step_by_lr_in_closed_form() -> None:
    grad = torch.tensor([3.0, -2.0])

    def value(lr: Tensor) -> Tensor:
        return sgd(lr).update(torch.ones(2), grad, sgd().init(torch.ones(2)))[0].sum()

    assert torch.func.grad(value)(torch.tensor(0.1)).item() == -1.0


def test_the_graph_reaches_a_tensor_of_one_element() -> None:
    rate = torch.tensor([0.1], requires_grad=True)
    param = torch.ones(2)
    new, _ = adamw(rate).update(param, param, adamw().init(param))
    new.sum().backward()
    assert rate.grad is not None
    assert rate.grad.shape == (1,)
    torch.testing.assert_close(rate.grad, torch.tensor([2 * (-0.01 - 1.0)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_one_element_of_any_shape_and_dtype_is_a_number(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    value = torch.full(shape, 1.0).to(dtype)
    param = noise(0, 3)
    new, _ = adam(value).update(param, GRADS[0], adam().init(param))
    expected, _ = adam(1.0).update(param, GRADS[0], adam().init(param))
    assert new.shape == param.shape
    torch.testing.assert_close(new, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", EVERY)
def test_no_tensor_makes_a_dtype_drift(name: str, dtype: torch.dtype) -> None:
    """0-d parameters are where torch's promotion rules would let a double-precision number in."""
    optimizer = EVERY[name]
    setting = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in optimizer.hyper.items()
        if isinstance(value, float) and value != 0.0
    }
    for shape in ((), (3,)):
        param = noise(0, *shape, dtype=dtype)
        state = optimizer.init(param)
        new, new_state = optimizer.update(param, noise(1, *shape, dtype=dtype), state, **setting)
        assert new.dtype == dtype
        for before, after in zip(state.leaves.stages, new_state.leaves.stages, strict=True):
            kinds = [[t.dtype for t in _flat(one)] for one in (before, after)]
            assert kinds[0] == kinds[1]
        optimizer.update_(param, noise(1, *shape, dtype=dtype), state, **setting)
        assert_same(param, new)


def _flat(state: Any) -> list[Tensor]:
    return [t for value in state for t in (value if isinstance(value, list) else [value])]


def test_two_links_share_a_tensor_lr() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = chain(clip_by_global_norm(1e9), decoupled_weight_decay(0.5), sgd(rate))
    param = torch.ones(1)
    new, _ = optimizer.update(param, param, optimizer.init(param))
    assert new.item() == 0.25


def test_the_first_step_size_of_rprop_has_a_derivative() -> None:
    """``lr`` is used by init, so a derivative by it has to go through init."""

    def value(lr: Tensor) -> Tensor:
        optimizer, param = rprop(lr), torch.ones(2)
        return optimizer.update(param, param, optimizer.init(param))[0].sum()

    assert torch.func.grad(value)(torch.tensor(0.1)).item() == -2.0
