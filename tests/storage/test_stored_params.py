"""Parameters in bfloat16: what each storage promises."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.storage import PARAM_STORAGES, stored
from functional_optim.storage.noise import Noise, salt

from .support import BASES, assert_same, normal, steps

BFLOAT16 = torch.bfloat16
SHAPES: dict[str, tuple[int, ...]] = {"a": (300,), "b": (4, 5), "c": ()}


def tree(seed: int, dtype: torch.dtype = BFLOAT16) -> dict[str, Tensor]:
    return {
        name: normal(*shape, seed=10 * seed + i).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def wide(one: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in one.items()}


@pytest.mark.parametrize("base", BASES)
def test_a_master_is_the_float32_run_to_the_bit(base: str) -> None:
    params, grads = tree(0), [tree(seed) for seed in range(1, 6)]
    optimizer = BASES[base]()
    got, state = steps(stored(optimizer, param="bfloat16+master"), params, grads)
    want, plain = steps(optimizer, wide(params), [wide(grad) for grad in grads])
    for name in params:
        own = state.leaves[name].stages[-1]
        assert_same(own.master, want[name])
        assert_same(got[name], want[name].bfloat16())
        inner = [v for one in plain.leaves[name].stages for v in one]
        assert_same(list(own[1:]), inner)


def test_what_others_write_into_a_parameter_wins_over_the_master() -> None:
    optimizer = stored(sgd(lr=0.5), param="bfloat16+master")
    param, grad = normal(6).bfloat16(), torch.full((6,), 2.0**-10).bfloat16()
    param, state = optimizer.update(param, grad, optimizer.init(param))
    kept = state.leaves.stages[-1].master
    param = param.clone()
    param[2], param[4] = 0.0, float("nan")
    after, state = optimizer.update(param, torch.zeros_like(grad), state)
    master = state.leaves.stages[-1].master
    untouched = [0, 1, 3, 5]
    assert_same(master[untouched], kept[untouched])
    assert master[2] == 0 and after[2] == 0
    assert master[4].isnan() and after[4].isnan()


@settings(max_examples=200, derandomize=True)
@given(
    significand=st.integers(2**23, 2**24 - 1),
    exponent=st.integers(-100, 100),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_a_compensation_keeps_seventeen_bits(significand: int, exponent: int, sign: float) -> None:
    value = torch.tensor([sign * significand * 2.0 ** (exponent - 23)])
    one = PARAM_STORAGES["bfloat16+kahan"]
    param, extras = one.encode(value, None)
    back = one.decode(param, extras)
    assert abs(float(back) - float(value)) <= 2.0**-17 * abs(float(value))
    assert float(back) == float(param) + float(extras[0])  # nothing is lost in the sum
    again, more = one.encode(back, None)
    assert_same(one.decode(again, more), back)


def test_a_compensation_of_another_parameter_is_dropped() -> None:
    optimizer = stored(sgd(lr=1.0), param="bfloat16+kahan")
    param = torch.ones(2).bfloat16()
    grad = torch.full((2,), 2.0**-9 * 0.75).bfloat16()
    param, state = optimizer.update(param, grad, optimizer.init(param))
    assert bool((state.leaves.stages[-1].compensation != 0).all())
    param = torch.tensor([0.0, 1.0]).bfloat16()  # the first one is written to
    after, state = optimizer.update(param, torch.zeros_like(grad), state)
    assert after[0] == 0 and state.leaves.stages[-1].compensation[0] == 0
    assert state.leaves.stages[-1].compensation[1] != 0


@pytest.mark.parametrize("name", ["bfloat16+master", "bfloat16+kahan"])
def test_infinities_stay(name: str) -> None:
    one = PARAM_STORAGES[name]
    value = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.0])
    back = one.decode(*one.encode(value, None))
    assert torch.equal(back.nan_to_num(7.0, 8.0, 9.0), value.nan_to_num(7.0, 8.0, 9.0))


def small_steps(param: str, count: int = 2000) -> float:
    """Where 1.0 is after that many steps of 2^-12, each a quarter of half a unit."""
    optimizer = stored(sgd(lr=1.0), param=param)
    value = torch.ones(64).bfloat16()
    state = optimizer.init(value)
    for _ in range(count):
        optimizer.update_(value, torch.full_like(value, 2.0**-12), state)
    one = PARAM_STORAGES[param]
    extras = tuple(state.leaves.stages[-1][: len(one.extras)])
    return float(one.decode(value, extras).mean())


def test_small_steps_are_lost_by_rounding_to_nearest_and_by_nothing_else() -> None:
    want = 1 - 2000 * 2.0**-12
    assert small_steps("bfloat16") == 1.0
    assert small_steps("bfloat16+master") == pytest.approx(want, abs=1e-4)
    assert small_steps("bfloat16+kahan") == pytest.approx(want, abs=2e-3)


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    grads = [(2.0**-12 * (1 + 0.1 * normal(1024, seed=t))).bfloat16() for t in range(200)]
    want = 1 - torch.stack([grad.double() for grad in grads]).sum(0)
    errors = []
    for seed in range(12):
        optimizer = stored(sgd(lr=1.0), param="bfloat16+stochastic", seed=seed)
        value, state = steps(optimizer, torch.ones(1024).bfloat16(), grads)
        errors.append((value.double() - want).mean())
        assert state.leaves.stages[-1].momentum_buffer == []
    # Elements that are equal, with equal gradients, move together: of 1024, some hundred differ.
    assert abs(float(torch.stack(errors).mean())) < 0.02 * (200 * 2.0**-12)


def test_the_rule_sees_float32() -> None:
    """A clip between two bfloat16 numbers shows in the float32 that it makes."""
    optimizer = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
    params, grad = torch.zeros(3).bfloat16(), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    _, state = steps(stored(optimizer, param="bfloat16+master"), params, [grad])
    want, _ = steps(optimizer, params.float(), [grad.float()])
    assert_same(state.leaves.stages[-1].master, want)
    assert not torch.equal(want.bfloat16().float(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", [name for name in PARAM_STORAGES if name != "float32"])
def test_parameters_of_another_dtype_are_refused(name: str, dtype: torch.dtype) -> None:
    optimizer = stored(adamw(), param=name)
    with pytest.raises(ValueError, match=r"stored_\w+ takes parameters of torch.bfloat16"):
        optimizer.init({"w": torch.ones(2, dtype=dtype)})
    state = optimizer.init({"w": torch.ones(2, dtype=BFLOAT16)})
    params = {"w": torch.ones(2, dtype=dtype)}
    with pytest.raises(ValueError, match=f"got {dtype} at 'w'"):
        optimizer.update(params, params, state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, BFLOAT16])
def test_a_stored_state_takes_float32_parameters(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"takes parameters of torch.float32, got {dtype}"):
        stored(adamw(), state="int8").init(torch.ones(2, dtype=dtype))


def test_noise_of_a_step_depends_on_seed_and_step() -> None:
    def run(optimizer: Optimizer, count: int) -> Any:
        grads = [torch.zeros(4096).bfloat16()] * (count - 1)
        grads.append(normal(4096, seed=1).bfloat16())
        return steps(optimizer, torch.ones(4096).bfloat16(), grads)[0]

    one = stored(sgd(lr=1e-3), param="bfloat16+stochastic")
    assert_same(run(one, 1), run(one, 1))
    assert not torch.equal(run(one, 1), run(one, 2))
    other = stored(sgd(lr=1e-3), param="bfloat16+stochastic", seed=1)
    assert not torch.equal(run(one, 1), run(other, 1))


def test_rounding_is_that_of_the_documented_bits() -> None:
    optimizer = stored(sgd(lr=0.1), param="bfloat16+stochastic", seed=5)
    param, grad = normal(50).bfloat16(), normal(50, seed=1).bfloat16()
    got, _ = steps(optimizer, param, [grad])
    result = torch.add(param.float(), grad.float(), alpha=-0.1)
    drawn = Noise.of(grad.float(), salt(1.0, 5)).bits(result, 0)
    words = result.view(torch.int32).long() + drawn
    want = (words & -65536).to(torch.int32).view(torch.float32).bfloat16()
    assert_same(got, want)
