"""Clipping by global norm and by value, against torch.nn.utils on the same gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adam, chain, clip_by_global_norm, clip_by_value, sgd

from .support import assert_same, noise

SHAPES = [(3, 4), (5,), (), (0, 2)]


def _grads(dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    return [(scale * noise(i, *shape)).to(dtype) for i, shape in enumerate(SHAPES)]


def _as_parameters(grads: list[Tensor]) -> list[nn.Parameter]:
    """Parameters that carry the gradients, for torch.nn.utils to clip in place."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


def _clipped(optimizer: Optimizer, grads: list[Any]) -> list[Tensor]:
    """What comes out of a chain that ends in sgd(lr=1): the clipped gradients, negated twice."""
    params = [None if grad is None else torch.zeros_like(grad) for grad in grads]
    new, _ = optimizer.update(params, grads, optimizer.init(params))
    return [None if param is None else -param for param in new]


def _by_norm(max_norm: float, grads: list[Any]) -> list[Tensor]:
    return _clipped(chain(clip_by_global_norm(max_norm), sgd(1.0)), grads)


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 0.5, 2.0, 1e3, math.inf])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 3e-7), (torch.bfloat16, 8e-3)]
)
def test_global_norm_is_that_of_torch(max_norm: float, dtype: torch.dtype, rtol: float) -> None:
    """Within an ulp or two: torch sums the norm, and rounds it, in the gradient's dtype."""
    grads = _grads(dtype)
    params = _as_parameters(grads)
    norm = nn.utils.clip_grad_norm_(params, max_norm, foreach=False)
    wanted = [param.grad for param in params]
    assert norm > 2.0
    torch.testing.assert_close(_by_norm(max_norm, grads), wanted, rtol=rtol, atol=0)


def test_a_norm_below_the_limit_changes_no_bit() -> None:
    grads = _grads(torch.float32)
    optimizer = chain(clip_by_global_norm(100.0), sgd(1.0))
    assert_same(_clipped(optimizer, grads), _clipped(sgd(1.0), grads))


def test_the_norm_after_clipping_is_the_limit() -> None:
    clipped = _by_norm(0.5, _grads(torch.float64, scale=1e6))
    total = torch.cat([grad.flatten() for grad in clipped]).norm().item()
    assert total == pytest.approx(0.5, rel=1e-11)


def test_the_norm_is_summed_in_double_precision() -> None:
    """In float32 the squares overflow, or vanish beside a large one."""
    huge = [torch.full((4,), 1e30), torch.full((4,), 1e30)]
    wanted = 1.0 / math.sqrt(8)
    for grad in _by_norm(1.0, huge):
        torch.testing.assert_close(grad, torch.full((4,), wanted), rtol=1e-6, atol=0)
    half = [torch.full((1000,), 300.0, dtype=torch.float16)]
    (grad,) = _by_norm(1.0, half)
    wanted = 1.0 / math.sqrt(1000)
    torch.testing.assert_close(grad, torch.full_like(grad, wanted), rtol=2e-3, atol=0)


def test_leaves_without_a_gradient_count_nothing() -> None:
    clipped = _by_norm(1.0, [torch.tensor([3.0]), None, torch.tensor([4.0])])
    torch.testing.assert_close(clipped[0], torch.tensor([0.6]))
    torch.testing.assert_close(clipped[2], torch.tensor([0.8]))


def test_dtypes_may_be_mixed() -> None:
    grads = [torch.tensor([3.0], dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16)]
    clipped = _by_norm(1.0, grads)
    assert [grad.dtype for grad in clipped] == [grad.dtype for grad in grads]
    for grad in clipped:
        assert grad.item() == pytest.approx(1 / math.sqrt(3), rel=4e-3)


def test_complex_gradients_count_as_their_real_view() -> None:
    grads = [noise(0, 4, dtype=torch.complex128), noise(1, 3)]
    views = [torch.view_as_real(grads[0]), grads[1]]
    clipped = _by_norm(0.5, grads)
    assert_same([torch.view_as_real(clipped[0]), clipped[1]], _by_norm(0.5, views))
    norm = torch.cat([view.flatten() for view in views]).norm()
    torch.testing.assert_close(clipped[1], grads[1] * 0.5 / norm, rtol=1e-5, atol=0)


class TestBadGradients:
    """What is not finite in one leaf stays in that leaf."""

    GOOD = torch.tensor([0.3, -0.4])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("max_norm", [0.0, 0.1, 10.0])
    def test_others_stay_finite(self, bad: float, max_norm: float) -> None:
        clipped = _by_norm(max_norm, [self.GOOD, torch.tensor([1.0, bad])])
        assert clipped[0].isfinite().all()
        assert not clipped[1].isfinite().all()

    def test_nan_counts_as_a_gradient_that_is_not_there(self) -> None:
        clipped = _by_norm(0.1, [self.GOOD, torch.tensor([1.0, math.nan])])
        assert_same(clipped[0], _by_norm(0.1, [self.GOOD])[0])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_the_state_of_others_stays_finite(self, bad: float) -> None:
        optimizer = chain(clip_by_global_norm(1.0), adam(0.1))
        params = {"a": torch.ones(2), "b": torch.ones(2)}
        grads = {"a": self.GOOD, "b": torch.tensor([1.0, bad])}
        new, state = optimizer.update(params, grads, optimizer.init(params))
        assert new["a"].isfinite().all()
        assert state.leaves["a"].stages[-1].exp_avg.isfinite().all()

    def test_no_limit_and_an_infinite_gradient(self) -> None:
        """``max_norm=inf`` clips nothing, so nothing may change where gradients are finite."""
        clipped = _by_norm(math.inf, [self.GOOD, torch.tensor([1.0, math.inf])])
        assert_same(clipped[0], self.GOOD)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.0, 0.3, 100.0, math.inf])
def test_clip_by_value_is_that_of_torch_bit_for_bit(limit: float, dtype: torch.dtype) -> None:
    grads = _grads(dtype)
    params = _as_parameters(grads)
    nn.utils.clip_grad_value_(params, limit, foreach=False)
    optimizer = chain(clip_by_value(limit), sgd(1.0))
    zeros = [torch.zeros_like(grad) for grad in grads]
    new, _ = optimizer.update(zeros, grads, optimizer.init(zeros))
    wanted, _ = sgd(1.0).update(zeros, [param.grad for param in params], sgd().init(zeros))
    assert_same(new, wanted)


def test_clip_by_value_keeps_nan_and_cuts_infinity() -> None:
    grad = torch.tensor([math.nan, math.inf, -math.inf, 0.1])
    (clipped,) = _clipped(chain(clip_by_value(2.0), sgd(1.0)), [grad])
    assert clipped[0].isnan()
    torch.testing.assert_close(clipped[1:], torch.tensor([2.0, -2.0, 0.1]))
    limit = torch.tensor(2.0)
    (with_tensor,) = _clipped(chain(clip_by_value(limit), sgd(1.0)), [grad])
    assert_same(with_tensor, clipped)
