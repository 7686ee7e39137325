"""Clipping by global norm and by value, compared with torch.nn.utils on the same gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, chain, clip_by_global_norm, clip_by_value, sgd
from functional_optim.frontends import gradient_norms
from tests.choices import each_value

from .support import assert_same, noise, step

SHAPES = [(3, 4), (5,), (), (0, 2)]
RTOL = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 8e-3}
"""An ulp or two, because torch sums and rounds the norm in the gradient's dtype."""
GOOD = torch.tensor([0.3, -0.4])


def _grads(dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    return [(scale * noise(i, *shape)).to(dtype) for i, shape in enumerate(SHAPES)]


def _by_torch(clip: Any, limit: float, grads: list[Tensor]) -> list[Any]:
    """Return the gradients after torch.nn.utils clips them in place."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    clip(params, limit, foreach=False)
    return [param.grad for param in params]


def _clipped(optimizer: Optimizer, grads: list[Any]) -> list[Any]:
    """Return the clipped gradients: the negated result of a chain that ends in sgd(lr=1)."""
    params = [None if grad is None else torch.zeros_like(grad) for grad in grads]
    new = step(optimizer, params, grads)
    return [None if param is None else -param for param in new]


def _by_norm(max_norm: float, grads: list[Any]) -> list[Any]:
    return _clipped(chain(clip_by_global_norm(max_norm), sgd(1.0)), grads)


@each_value(dtype=list(RTOL), limit=[0.0, 1e-3, 0.5, 2.0, 1e3, math.inf])
def test_both_clip_as_torch_does(dtype: torch.dtype, limit: float) -> None:
    grads = _grads(dtype)
    wanted = _by_torch(nn.utils.clip_grad_norm_, limit, grads)
    torch.testing.assert_close(_by_norm(limit, grads), wanted, rtol=RTOL[dtype], atol=0)
    wanted = _by_torch(nn.utils.clip_grad_value_, limit, grads)
    assert_same(_clipped(chain(clip_by_value(limit), sgd(1.0)), grads), _clipped(sgd(1.0), wanted))


@each_value(dtype=[torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_scaled_by_the_number_itself(dtype: torch.dtype) -> None:
    """As in torch, the scale is not rounded to 16 bits, where 0.3 would be 0.30078125."""
    grads = _grads(dtype)
    scaled = [grad.clone() for grad in grads]
    gradient_norms.scale_([*scaled, None], 0.3)
    assert_same(scaled, [grad * 0.3 for grad in grads])


def test_a_norm_is_brought_to_the_limit_and_below_it_no_bit_changes() -> None:
    clipped = _by_norm(0.5, _grads(torch.float64, scale=1e6))
    total = torch.cat([grad.flatten() for grad in clipped]).norm().item()
    assert total == pytest.approx(0.5, rel=1e-11)
    grads = _grads(torch.float32)
    assert_same(_by_norm(100.0, grads), _clipped(sgd(1.0), grads))


def test_the_norm_is_summed_in_double_precision() -> None:
    """In float32, the squares would overflow, or vanish beside a large one."""
    huge = [torch.full((4,), 1e30), torch.full((4,), 1e30)]
    wanted = 1.0 / math.sqrt(8)
    for grad in _by_norm(1.0, huge):
        torch.testing.assert_close(grad, torch.full((4,), wanted), rtol=1e-6, atol=0)
    (grad,) = _by_norm(1.0, [torch.full((1000,), 300.0, dtype=torch.float16)])
    wanted = 1.0 / math.sqrt(1000)
    torch.testing.assert_close(grad, torch.full_like(grad, wanted), rtol=2e-3, atol=0)


def test_leaves_of_any_dtype_count_and_those_without_a_gradient_do_not() -> None:
    clipped = _by_norm(1.0, [torch.tensor([3.0]), None, torch.tensor([4.0])])
    torch.testing.assert_close(clipped[0], torch.tensor([0.6]))
    torch.testing.assert_close(clipped[2], torch.tensor([0.8]))
    grads = [torch.tensor([3.0], dtype=dtype) for dtype in RTOL]
    for grad, like in zip(_by_norm(1.0, grads), grads, strict=True):
        assert grad.dtype == like.dtype
        assert grad.item() == pytest.approx(1 / math.sqrt(3), rel=4e-3)


def test_complex_gradients_count_as_their_real_view() -> None:
    grads = [noise(0, 4, dtype=torch.complex128), noise(1, 3)]
    views = [torch.view_as_real(grads[0]), grads[1]]
    clipped = _by_norm(0.5, grads)
    assert_same([torch.view_as_real(clipped[0]), clipped[1]], _by_norm(0.5, views))
    norm = torch.cat([view.flatten() for view in views]).norm()
    torch.testing.assert_close(clipped[1], grads[1] * 0.5 / norm, rtol=1e-5, atol=0)


@each_value(bad=[math.nan, math.inf, -math.inf], limit=[0.0, 0.1, 10.0, math.inf])
def test_what_is_not_finite_is_treated_as_in_torch(bad: float, limit: float) -> None:
    """NaN makes all gradients NaN. An infinity makes finite gradients 0, if the limit is finite."""
    grads = [GOOD, torch.tensor([1.0, bad])]
    clipped = _by_norm(limit, grads)
    wanted = _by_torch(nn.utils.clip_grad_norm_, limit, grads)
    torch.testing.assert_close(clipped, wanted, rtol=0, atol=0, equal_nan=True)
    assert clipped[0].isfinite().all() == (math.isinf(bad) and math.isfinite(limit))


def test_clip_by_value_keeps_nan_and_cuts_infinity() -> None:
    grad = torch.tensor([math.nan, math.inf, -math.inf, 0.1])
    (clipped,) = _clipped(chain(clip_by_value(2.0), sgd(1.0)), [grad])
    assert clipped[0].isnan()
    torch.testing.assert_close(clipped[1:], torch.tensor([2.0, -2.0, 0.1]))
    (with_tensor,) = _clipped(chain(clip_by_value(torch.tensor(2.0)), sgd(1.0)), [grad])
    assert_same(with_tensor, clipped)
