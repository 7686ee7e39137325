"""Random bits: a pure function of an element, without bias."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.storage import STATE_STORAGES
from functional_optim.storage.rounding import Noise, round_stochastically, round_to_nearest, salt

from ..choices import case, examples
from ..tensors import bits, normal

COUNT = 50_000


def rounded(value: Tensor, seed: int, step: float = 1.0, stream: int = 0) -> Tensor:
    return round_stochastically(
        value, Noise.of(normal(*value.shape, seed=seed), salt(step, 0)), stream
    )


def test_one_value_under_many_gradients_has_no_bias() -> None:
    for fraction, sign in itertools.product([0.0, 0.001, 0.25, 0.5, 0.9, 0.999], [1.0, -1.0]):
        with case(fraction=fraction, sign=sign):
            value = torch.full((COUNT,), sign * (1 + fraction * 2.0**-7))
            up = (rounded(value, seed=1).abs() > 1).double().mean()
            deviation = math.sqrt(fraction * (1 - fraction) / COUNT)
            assert abs(float(up) - fraction) <= 5 * deviation + 2.0**-16


def test_one_element_over_many_steps_has_no_bias() -> None:
    """The value and the gradient are the same in each step, such as with a zero gradient."""
    value, grad, steps = torch.tensor([1 + 0.3 * 2.0**-7]), torch.zeros(1), 1024
    ups = [
        bool(round_stochastically(value, Noise.of(grad, salt(float(t), 0)), 0) > 1)
        for t in range(1, steps + 1)
    ]
    assert abs(sum(ups) / steps - 0.3) < 5 * math.sqrt(0.21 / steps)
    pairs = sum(a and b for a, b in itertools.pairwise(ups)) / (steps - 1)
    assert abs(pairs - 0.09) < 0.03  # one step does not predict the next


def test_many_values_have_no_bias_under_simple_gradients() -> None:
    value = normal(COUNT, seed=3)
    unit = 2.0 ** (value.abs().log2().floor() - 7)
    grads = {
        "zero": torch.zeros(COUNT),
        "one": torch.ones(COUNT),
        "bfloat16": normal(COUNT, seed=4).bfloat16().float(),
    }
    for name, grad in grads.items():
        with case(grad=name):
            noise = Noise.of(grad, salt(1.0, 0))
            error = ((round_stochastically(value, noise, 0) - value) / unit).double()
            assert abs(float(error.mean())) < 5 * math.sqrt(1 / 6 / COUNT)
            assert abs(float(error.square().mean()) - 1 / 6) < 0.005


def test_all_sixteen_bits_are_even_and_unrelated_to_the_value() -> None:
    value = normal(COUNT, seed=3)
    found = Noise.of(torch.zeros(COUNT), salt(1.0, 0)).bits(value, 0)
    assert int(found.min()) >= 0 and int(found.max()) <= 65535
    low = bits(value).long() & 0xFFFF
    for k in range(16):
        bit = ((found >> k) & 1).double()
        assert abs(float(bit.mean()) - 0.5) < 5 * 0.5 / math.sqrt(COUNT)
        shared = torch.corrcoef(torch.stack([bit, low.double()]))[0, 1]
        assert abs(float(shared)) < 5 / math.sqrt(COUNT)


def test_int8_codes_have_no_bias() -> None:
    one = STATE_STORAGES["int8+stochastic"]
    # Values below 2^-34 of the largest are rounded up on purpose, so all values are above zero.
    value = normal(COUNT, seed=5).square() + 1e-6
    total = torch.zeros(COUNT, dtype=torch.float64)
    rounds = 20
    for step in range(rounds):
        noise = Noise.of(normal(COUNT, seed=step), salt(float(step + 1), 0))
        total += one.decode(one.encode(value, noise, 1))
    relative = total / rounds / value - 1
    # A step is at most an eighth of a value; the variance is at most a quarter of its square.
    assert abs(float(relative.mean())) < 5 * 0.0625 / math.sqrt(COUNT * rounds)


def test_equal_elements_get_equal_bits_and_others_do_not() -> None:
    value, grad = torch.full((2,), 1.001), torch.full((2,), 0.5)
    noise = Noise.of(grad, salt(1.0, 0))
    a, b = noise.bits(value, 0)
    assert a == b
    others = {
        int(a),
        int(noise.bits(value, 1)[0]),
        int(noise.bits(value + 1e-6, 0)[0]),
        int(Noise.of(grad + 1e-6, salt(1.0, 0)).bits(value, 0)[0]),
        int(Noise.of(grad, salt(2.0, 0)).bits(value, 0)[0]),
        int(Noise.of(grad, salt(1.0, 1)).bits(value, 0)[0]),
    }
    assert len(others) == 6


@examples(25)
@given(step=st.integers(1, 10**8), seed=st.integers(0, 2**31))
def test_salts_are_whole_and_fit_float32(step: int, seed: int) -> None:
    found = salt(float(step), seed)
    assert 0 <= found < 2**24 and found == int(found)
    assert found == (step * 10_368_889 + (seed * 7_368_787 + 1_013_904_223) % 2**24) % 2**24
    assert float(salt(torch.tensor(float(step), dtype=torch.float64), seed)) == found


def test_a_salt_may_be_a_number_or_a_tensor() -> None:
    value, grad = normal(100), normal(100, seed=1)
    want = Noise.of(grad, salt(3.0, 0)).bits(value, 0)
    for dtype in (torch.float32, torch.float64):
        number = torch.tensor(salt(3.0, 0), dtype=dtype)
        assert torch.equal(Noise.of(grad, number).bits(value, 0), want)


def every_kind_of_float() -> Tensor:
    """Return both signs of every exponent, with the significands at which rounding changes."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    ends = torch.tensor([0, 1, 0x55, 0x7E, 0x7F])
    words = torch.arange(512)[:, None, None] << 23 | ends[:, None] << 16 | low
    return words.reshape(-1).to(torch.int32).view(torch.float32)


def test_every_float_rounds_as_it_should() -> None:
    value = every_kind_of_float()
    is_nan = value.isnan()
    assert torch.equal(
        bits(round_to_nearest(value).bfloat16())[~is_nan], bits(value.bfloat16())[~is_nan]
    )
    words = bits(value)
    below = (words & -65536).view(torch.float32)
    above = ((words | 0xFFFF) + 1).view(torch.float32)
    for seed in range(20):
        found = rounded(value, seed)
        fine = (found == below) | ((found == above) & (value != below))
        assert bool((fine | is_nan).all())
        assert bool(found.bfloat16().isnan()[is_nan].all()), "a NaN became a number"
    assert bool(round_to_nearest(value).isnan()[is_nan].all())
