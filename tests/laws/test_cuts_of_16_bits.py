"""16-bit parameters cut between elements: torch rounds some elements twice, with a small effect."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import adamw, sgd

from ..choices import case, examples

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""
LENGTHS = st.integers(1, 200)


def numbers(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_it_is_torch_that_rounds_the_end_of_a_tensor_twice() -> None:
    """torch rounds the last elements of a tensor twice.

    If this test fails, torch has changed, and the documentation of cuts is out of date.
    """
    param, grad = numbers(0, 165, torch.bfloat16), numbers(1, 165, torch.bfloat16)
    whole = torch.add(param, grad, alpha=-0.1)
    alpha = torch.tensor(-0.1, dtype=torch.bfloat16).double()
    once = (param.double() + alpha * grad.double()).to(torch.bfloat16)
    assert torch.equal(whole[:160], once[:160])
    cut = [torch.add(*pair, alpha=-0.1) for pair in zip(*_halves(param, grad, 63), strict=True)]
    assert not torch.equal(whole, torch.cat(cut))


def _halves(param: Tensor, grad: Tensor, at: int) -> tuple[list[Tensor], list[Tensor]]:
    return [param[:at], param[at:]], [grad[:at], grad[at:]]


@examples(15)
@given(count=LENGTHS, at=LENGTHS, seed=st.integers(0, 9))
def test_sgd_is_cut_within_two_roundings_and_adamw_bit_for_bit(
    count: int, at: int, seed: int
) -> None:
    """A cut changes SGD by at most two roundings, and AdamW not at all.

    The two roundings are those of the product with the learning rate and of the result.
    """
    lr = 0.1
    for dtype, roundoff in ROUNDOFF.items():
        param, grad = numbers(seed, count, dtype), numbers(seed + 10, count, dtype)
        params, grads = _halves(param, grad, min(at, count))
        with case(dtype=dtype):
            optimizer = sgd(lr)
            whole, _ = optimizer.update(param, grad, optimizer.init(param))
            parts, _ = optimizer.update(params, grads, optimizer.init(params))
            one, other = whole.double(), torch.cat(parts).double()
            most = (lr * grad.double()).abs() + torch.maximum(one.abs(), other.abs())
            assert ((one - other).abs() <= 2 * roundoff * most).all()
            exact = adamw(lr)
            whole, _ = exact.update(param, grad, exact.init(param))
            parts, _ = exact.update(params, grads, exact.init(params))
            assert torch.equal(torch.cat(parts), whole)
