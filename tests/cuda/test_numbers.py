"""Tests of scalars on a device: hyper-parameters in tensors, 16-bit coefficients, populations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    TorchOptimizer,
    adagrad,
    adam,
    adamw,
    algorithms,
    apply_if_finite,
    chain,
    lion,
    rprop,
    sgd,
)
from functional_optim.frontends import gradient_norms
from tests.core.test_numeric_tensors import CALLS, DTYPES
from tests.front_ends.support import noise

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def drawn(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(2000, generator=generator, dtype=torch.float64) + 0.5).to("cuda", dtype)


@pytest.mark.parametrize("value", [0.999, 0.001, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_stands_for_its_number(name: str, dtype: torch.dtype, value: float) -> None:
    """16-bit results are rounded where torch rounds, which differs from the CPU.

    On a device, torch divides by a number by multiplying with its inverse.
    """
    function, count = CALLS[name]
    given = [drawn(seed, dtype) for seed in range(count)]
    number: Any = torch.tensor(value, dtype=torch.float64, device="cuda")
    want, got = function(*given, value), function(*given, number)
    apart = (got.double() - want.double()).abs() / want.double().abs()
    assert got.dtype == dtype
    assert float(apart.max()) <= 2.0 * torch.finfo(dtype).eps
    if name in ("mul", "shift") and dtype.itemsize == 2:
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_are_scaled_by_the_number_itself(dtype: torch.dtype) -> None:
    """A number keeps its precision: 0.3 would be 0.30078125 in bfloat16."""
    grads = [drawn(seed, dtype) for seed in range(3)]
    scaled = [grad.clone() for grad in grads]
    gradient_norms.scale_([*scaled, None], 0.3)
    for got, grad in zip(scaled, grads, strict=True):
        assert torch.equal(got, grad * 0.3)


@pytest.mark.parametrize("make", [rprop, adam, adamw, sgd, lion])
def test_a_learning_rate_on_the_device_is_that_number(make: Any) -> None:
    """The initial state may also depend on the learning rate, as in Rprop."""
    pairs = [[nn.Parameter(noise(k, 5, 3).cuda()) for k in range(3)] for _ in range(2)]
    rate = torch.tensor(0.0625, device="cuda")
    optimizers = [
        TorchOptimizer(pairs[0], make(lr=rate)),
        TorchOptimizer(pairs[1], make(lr=0.0625)),
    ]
    for seed in range(4):
        for params, optimizer in zip(pairs, optimizers, strict=True):
            for k, param in enumerate(params):
                param.grad = noise(10 * seed + k, 5, 3).cuda()
            optimizer.step()
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_an_initial_value_on_the_device_is_that_number() -> None:
    first: Any = torch.tensor(0.5, device="cuda")
    param, grad = noise(0, 4).cuda(), noise(1, 4).cuda()
    made = [adagrad(0.1, initial_accumulator_value=one) for one in (first, 0.5)]
    got, want = (one.update(param, grad, one.init(param)) for one in made)
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize("name", ["dadapt_sgd", "dadapt_adam", "prodigy", "dog", "adamw"])
@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_a_population_steps_as_its_members(name: str, default: str) -> None:
    """A vmapped population steps like its members, with either default device."""
    optimizer = getattr(algorithms, name)()
    every = [[noise(10 * step + k, 4, 3).double().cuda() for k in range(3)] for step in range(4)]
    with torch.device(default):
        params = every[3]
        states = [optimizer.init(param) for param in params]
        together: Any = torch.stack(params), torch.vmap(optimizer.init)(torch.stack(params))
        for grads in every[:3]:
            together = torch.vmap(optimizer.update)(together[0], torch.stack(grads), together[1])
            for k in range(3):
                params[k], states[k] = optimizer.update(params[k], grads[k], states[k])
            torch.testing.assert_close(together[0], torch.stack(params), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_gradients_are_looked_at_together(bad: float | None) -> None:
    """A NaN or infinity skips the step; large finite values do not, even if their sum overflows."""
    params = [nn.Parameter(noise(k, 70).cuda()) for k in range(5)]
    before = [one.detach().clone() for one in params]
    optimizer = TorchOptimizer(params, chain(apply_if_finite(3), sgd(0.5)))
    for k, param in enumerate(params):
        param.grad = torch.full_like(param, 3e38 if k == 2 else 1.0)
    if bad is not None:
        params[3].grad[7] = bad  # type: ignore[index]
    optimizer.step()
    assert float(optimizer.shared["apply_if_finite"].not_finite) == (0.0 if bad is None else 1.0)
    for was, param in zip(before, params, strict=True):
        assert torch.equal(was, param) == (bad is not None)
