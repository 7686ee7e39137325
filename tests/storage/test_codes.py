"""8-bit codes and bfloat16: error bounds, exact values, and values that are not finite."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.storage import STATE_STORAGES
from functional_optim.storage.rounding import Noise, salt
from functional_optim.storage.state_storage import BLOCK

from ..choices import case, examples
from ..tensors import assert_same, normal

CODES = ("int8", "int8+stochastic")
SMALLEST = 2.0**-149

values = st.one_of(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-1.0, 1.0, width=32),
    st.sampled_from([0.0, -0.0, 1e-38, -1e-45, 3e38]),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw tensors near the block length, with listed or widely spread values, maybe unsigned."""
    count = draw(st.one_of(st.integers(0, 5), st.sampled_from([255, 256, 257, 600])))
    if count <= 5:
        tensor = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)))
        tensor = tensor.to(torch.float32)
    else:
        seed = draw(st.integers(0, 99))
        spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
        tensor = normal(count, seed=seed) * 10 ** (spread * normal(count, seed=seed + 1))
    return tensor.abs() if draw(st.booleans()) else tensor


def of_block(tensor: Tensor) -> Tensor:
    """Return, for each element, the largest element of its block."""
    rows = torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    return rows.amax(dim=1).repeat_interleave(BLOCK)[: tensor.numel()]


def noise_of(name: str, like: Tensor, step: float = 1.0) -> Noise | None:
    stochastic = STATE_STORAGES[name].stochastic
    return Noise.of(normal(*like.shape, seed=7), salt(step, 0)) if stochastic else None


def kept(name: str, x: Tensor, step: float = 1.0) -> Tensor:
    """Encode numbers by a storage of state, and decode them."""
    one = STATE_STORAGES[name]
    return one.decode(one.encode(x, noise_of(name, x, step), 1))


def room(x: Tensor, *, stochastic: bool) -> Tensor:
    """Return the documented error bound of a code."""
    signed = of_block(x.signbit().to(torch.float32)) > 0
    share, least = (1 / 8, 2.0**-18) if stochastic else (1 / 16, 2.0**-19)
    absolute = torch.where(signed, least, 2.0**-34).double() * of_block(x.abs())
    return x.abs().double() * share + absolute + SMALLEST


@examples(40)
@given(x=tensors())
def test_error_is_bounded(x: Tensor) -> None:
    for name in CODES:
        with case(name=name):
            back = kept(name, x)
            bound = room(x, stochastic=STATE_STORAGES[name].stochastic)
            assert bool(((x.double() - back).abs() <= bound).all())
            assert back.dtype == torch.float32 and back.shape == x.shape


@examples(40)
@given(x=tensors())
def test_largest_zero_and_sign_are_exact_and_what_was_decoded_encodes_to_itself(x: Tensor) -> None:
    for name in CODES:
        with case(name=name):
            back = kept(name, x)
            largest = x.abs() == of_block(x.abs())
            assert torch.equal(back[largest], x[largest])
            assert not bool(back[x == 0].any())
            assert bool((back * x.sign() >= 0).all())
            assert torch.equal(kept(name, back, step=9.0), back)


def test_a_code_that_is_off_by_one_breaks_the_bound() -> None:
    """A code with an error of one breaks the bound, so the tests above can fail."""
    one = STATE_STORAGES["int8"]
    x = normal(BLOCK)
    codes, scale = one.encode(x, None, 1)
    off = one.decode((codes ^ 1, scale))
    assert bool(((x - off).abs() > room(x, stochastic=False)).any())


def test_without_negative_numbers_only_zero_becomes_zero() -> None:
    x = torch.tensor([1.0, 1e-4, 1e-10, 1e-20, 0.0])
    for name in CODES:
        assert (kept(name, x) > 0).tolist() == [True, True, True, True, False], name
        signed = torch.cat([x, torch.tensor([-1.0])])
        assert kept(name, signed)[3] == 0, name  # with a sign bit, a tiny number may become zero


def test_what_is_not_finite_makes_its_block_so() -> None:
    for name in CODES:
        for bad in (float("nan"), float("inf"), -float("inf")):
            with case(name=name, bad=bad):
                x = normal(3 * BLOCK)
                x[BLOCK + 5] = bad
                finite = kept(name, x).isfinite()
                assert not bool(finite[BLOCK : 2 * BLOCK].any())
                assert bool(finite[:BLOCK].all()) and bool(finite[2 * BLOCK :].all())


def test_form_of_what_is_kept() -> None:
    x = normal(30, 30)
    for name in CODES:
        with case(name=name):
            one = STATE_STORAGES[name]
            codes, scale = one.encode(x, noise_of(name, x), 1)
            assert codes.shape == x.shape and codes.dtype == torch.uint8
            assert scale.shape == (4,) and scale.dtype == torch.float32
            assert bool((scale < 0).all())
            _, scale = one.encode(x.square(), noise_of(name, x), 1)
            assert bool((scale > 0).all())


def test_blocks_are_in_row_major_order() -> None:
    x = normal(20, 50)
    for name in CODES:
        with case(name=name):
            one, noise = STATE_STORAGES[name], noise_of(name, x)
            codes = one.encode(x, noise, 1)
            flat = Noise(noise.common.reshape(-1)) if noise is not None else None
            assert_same([part.reshape(-1) for part in codes], [*one.encode(x.view(-1), flat, 1)])
            assert_same(codes, one.encode(x.T.contiguous().T, noise, 1))


@examples(25)
@given(x=tensors())
def test_bfloat16_is_within_a_unit(x: Tensor) -> None:
    x = x.clamp(-1e38, 1e38)
    for name, unit in (("bfloat16", 2.0**-8), ("bfloat16+stochastic", 2.0**-7)):
        with case(name=name):
            (stored,) = STATE_STORAGES[name].encode(x, noise_of(name, x), 1)
            assert stored.dtype == torch.bfloat16
            back = kept(name, x)
            assert bool(((back - x).abs() <= x.abs() * unit + 2.0**-133).all())
            assert torch.equal(kept(name, back, step=5.0), back)
