"""The 8-bit code: its error bound, what is exact, and what is not finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.storage import STATE_STORAGES
from functional_optim.storage.noise import Noise, salt
from functional_optim.storage.state_storage import BLOCK

from .support import assert_same, normal

CODES = ("int8", "int8+stochastic")
SMALLEST = 2.0**-149

values = st.one_of(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-1.0, 1.0, width=32),
    st.sampled_from([0.0, -0.0, 1e-38, -1e-45, 3e38]),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Lengths around the block's, values listed or spread over many magnitudes, maybe no sign."""
    count = draw(st.one_of(st.integers(0, 5), st.sampled_from([255, 256, 257, 600])))
    if count <= 5:
        tensor = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)))
        tensor = tensor.to(torch.float32)
    else:
        seed = draw(st.integers(0, 99))
        spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
        tensor = normal(count, seed=seed) * 10 ** (spread * normal(count, seed=seed + 1))
    return tensor.abs() if draw(st.booleans()) else tensor


def of_block(tensor: Tensor, reduced: str) -> Tensor:
    """For each element, the largest or smallest of its block."""
    rows = torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    return getattr(rows, reduced)(dim=1).repeat_interleave(BLOCK)[: tensor.numel()]


def noise_of(name: str, like: Tensor, step: float = 1.0) -> Noise | None:
    stochastic = STATE_STORAGES[name].stochastic
    return Noise.of(normal(*like.shape, seed=7), salt(step, 0)) if stochastic else None


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=150, derandomize=True)
@given(x=tensors())
def test_error_is_bounded(name: str, x: Tensor) -> None:
    one = STATE_STORAGES[name]
    back = one.decode(one.encode(x, noise_of(name, x), 1))
    signed = of_block(x.signbit().to(torch.float32), "amax") > 0
    share, least = (1 / 8, 2.0**-18) if one.stochastic else (1 / 16, 2.0**-19)
    absolute = torch.where(signed, least, 2.0**-34).double() * of_block(x.abs(), "amax")
    bound = x.abs().double() * share + absolute
    assert bool(((x.double() - back).abs() <= bound + SMALLEST).all())
    assert back.dtype == torch.float32 and back.shape == x.shape


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=150, derandomize=True)
@given(x=tensors())
def test_what_was_decoded_encodes_to_itself(name: str, x: Tensor) -> None:
    one = STATE_STORAGES[name]
    back = one.decode(one.encode(x, noise_of(name, x), 1))
    again = one.decode(one.encode(back, noise_of(name, x, step=9.0), 2))
    assert torch.equal(again, back)


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=150, derandomize=True)
@given(x=tensors())
def test_largest_zero_and_sign_are_exact(name: str, x: Tensor) -> None:
    one = STATE_STORAGES[name]
    back = one.decode(one.encode(x, noise_of(name, x), 1))
    largest = x.abs() == of_block(x.abs(), "amax")
    assert torch.equal(back[largest], x[largest])
    assert not bool(back[x == 0].any())
    assert bool((back * x.sign() >= 0).all())


@pytest.mark.parametrize("name", CODES)
def test_without_negative_numbers_only_zero_becomes_zero(name: str) -> None:
    one = STATE_STORAGES[name]
    x = torch.tensor([1.0, 1e-4, 1e-10, 1e-20, 0.0])
    back = one.decode(one.encode(x, noise_of(name, x), 1))
    assert (back > 0).tolist() == [True, True, True, True, False]
    signed = torch.cat([x, torch.tensor([-1.0])])
    back = one.decode(one.encode(signed, noise_of(name, signed), 1))
    assert back[3] == 0  # with a sign bit, what is tiny may go


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_so(name: str, bad: float) -> None:
    one = STATE_STORAGES[name]
    x = normal(3 * BLOCK)
    x[BLOCK + 5] = bad
    back = one.decode(one.encode(x, noise_of(name, x), 1))
    finite = back.isfinite()
    assert not bool(finite[BLOCK : 2 * BLOCK].any())
    assert bool(finite[:BLOCK].all()) and bool(finite[2 * BLOCK :].all())


@pytest.mark.parametrize("name", CODES)
def test_form_of_what_is_kept(name: str) -> None:
    one = STATE_STORAGES[name]
    x = normal(30, 30)
    codes, scale = one.encode(x, noise_of(name, x), 1)
    assert codes.shape == x.shape and codes.dtype == torch.uint8
    assert scale.shape == (4,) and scale.dtype == torch.float32
    assert bool((scale < 0).all())
    _, scale = one.encode(x.square(), noise_of(name, x), 1)
    assert bool((scale > 0).all())


@pytest.mark.parametrize("name", CODES)
def test_blocks_are_in_row_major_order(name: str) -> None:
    one = STATE_STORAGES[name]
    x = normal(20, 50)
    kept = one.encode(x, noise_of(name, x), 1)
    noise = noise_of(name, x)
    flat = Noise(noise.common.reshape(-1)) if noise is not None else None
    assert_same([part.reshape(-1) for part in kept], list(one.encode(x.reshape(-1), flat, 1)))
    across = one.encode(x.T.contiguous().T, noise, 1)
    assert_same(list(kept), list(across))


def test_a_single_code_is_not_enough() -> None:
    """A guard on the tests above: a code that is off by one step breaks the bound."""
    one = STATE_STORAGES["int8"]
    x = normal(BLOCK)
    codes, scale = one.encode(x, None, 1)
    off = one.decode(((codes ^ 1), scale))
    assert bool(((x - off).abs() > x.abs() / 16 + 2.0**-19 * x.abs().max()).any())


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16+stochastic"])
@settings(max_examples=100, derandomize=True)
@given(x=tensors())
def test_bfloat16_is_within_a_unit(name: str, x: Tensor) -> None:
    one = STATE_STORAGES[name]
    x = x.clamp(-1e38, 1e38)
    (kept,) = one.encode(x, noise_of(name, x), 1)
    back = one.decode((kept,))
    assert kept.dtype == torch.bfloat16
    unit = 2.0**-7 if one.stochastic else 2.0**-8
    assert bool(((back - x).abs() <= x.abs() * unit + 2.0**-133).all())
    assert torch.equal(one.decode(one.encode(back, noise_of(name, x, 5.0), 2)), back)
