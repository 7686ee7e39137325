"""Comparison of two tensors by their bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from functional_optim.core.bit_equality import same_bits
from tests.choices import each

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)


def of(*numbers: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


@each(dtype=DTYPES)
def test_floats_are_the_same_by_their_bits(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    one = of(0.0, -0.0, inf, 1.0, nan, dtype=dtype)
    assert same_bits(one, one.clone())
    assert same_bits(one, of(0.0, -0.0, inf, 1.0, -nan, dtype=dtype))
    assert same_bits(of(1.0, 7.0, 2.0, 7.0, dtype=dtype)[::2], of(1.0, 2.0, dtype=dtype))
    assert not same_bits(one, of(-0.0, -0.0, inf, 1.0, nan, dtype=dtype))
    assert not same_bits(one, of(0.0, -0.0, inf, 1.0, 0.0, dtype=dtype))
    assert not same_bits(one, one[:4])
    assert not same_bits(one, one.double() if dtype != torch.float64 else one.float())


@pytest.fixture
def denormals_are_flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("denormals_are_flushed")
def test_two_denormals_are_not_the_same_where_they_are_flushed() -> None:
    bits = torch.tensor([1, 2], dtype=torch.int32)
    one, other = bits.view(torch.float32).unbind()
    assert bool(one == other)  # they are equal as numbers
    assert not same_bits(one, other)
