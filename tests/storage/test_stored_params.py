"""Parameters in bfloat16, and the promises of each storage."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.storage import PARAM_STORAGES, stored
from functional_optim.storage.rounding import Noise, salt

from ..choices import case, examples
from ..tensors import assert_same, normal
from .support import BASES, steps

BFLOAT16 = torch.bfloat16
SHAPES: dict[str, tuple[int, ...]] = {"a": (300,), "b": (4, 5), "c": ()}


def tree(seed: int, dtype: torch.dtype = BFLOAT16) -> dict[str, Tensor]:
    return {
        name: normal(*shape, seed=10 * seed + i).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def wide(one: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in one.items()}


def test_a_master_is_the_float32_run_to_the_bit() -> None:
    params, grads = tree(0), [tree(seed) for seed in range(1, 4)]
    for base, make in BASES.items():
        optimizer = make()
        got, state = steps(stored(optimizer, param="bfloat16+master"), params, grads)
        want, plain = steps(optimizer, wide(params), [wide(grad) for grad in grads])
        for name in params:
            with case(base=base, name=name):
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


@examples(25)
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
    assert float(back) == float(param) + float(extras[0])  # the sum is exact
    again, more = one.encode(back, None)
    assert_same(one.decode(again, more), back)


def test_a_compensation_of_another_parameter_is_dropped() -> None:
    optimizer = stored(sgd(lr=1.0), param="bfloat16+kahan")
    param = torch.ones(2).bfloat16()
    grad = torch.full((2,), 2.0**-9 * 0.75).bfloat16()
    param, state = optimizer.update(param, grad, optimizer.init(param))
    assert bool((state.leaves.stages[-1].compensation != 0).all())
    param = torch.tensor([0.0, 1.0]).bfloat16()  # the first element is overwritten
    after, state = optimizer.update(param, torch.zeros_like(grad), state)
    assert after[0] == 0 and state.leaves.stages[-1].compensation[0] == 0
    assert state.leaves.stages[-1].compensation[1] != 0


def test_infinities_stay() -> None:
    value = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.0])
    for name in ("bfloat16+master", "bfloat16+kahan"):
        one = PARAM_STORAGES[name]
        back = one.decode(*one.encode(value, None))
        same = torch.equal(back.nan_to_num(7.0, 8.0, 9.0), value.nan_to_num(7.0, 8.0, 9.0))
        assert same, name


STEPS = 100


def after_small_steps(param: str) -> float:
    """Return the value of 1.0 after steps of 2^-12, each a quarter of half a unit."""
    optimizer = stored(sgd(lr=1.0), param=param)
    value = torch.ones(64).bfloat16()
    state = optimizer.init(value)
    for _ in range(STEPS):
        optimizer.update_(value, torch.full_like(value, 2.0**-12), state)
    one = PARAM_STORAGES[param]
    extras = tuple(state.leaves.stages[-1][: len(one.extras)])
    return float(one.decode(value, extras).mean())


def test_small_steps_are_lost_by_rounding_to_nearest_and_by_nothing_else() -> None:
    want = 1 - STEPS * 2.0**-12
    assert after_small_steps("bfloat16") == 1.0
    assert after_small_steps("bfloat16+master") == pytest.approx(want, abs=1e-5)
    assert after_small_steps("bfloat16+kahan") == pytest.approx(want, abs=2e-4)


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    grads = [(2.0**-12 * (1 + 0.1 * normal(1024, seed=t))).bfloat16() for t in range(STEPS)]
    want = 1 - torch.stack([grad.double() for grad in grads]).sum(0)
    errors = []
    for seed in range(3):
        optimizer = stored(sgd(lr=1.0), param="bfloat16+stochastic", seed=seed)
        value, state = steps(optimizer, torch.ones(1024).bfloat16(), grads)
        errors.append((value.double() - want).mean())
        assert state.leaves.stages[-1].momentum_buffer == []
    # Equal elements with equal gradients move together: some hundred of the 1024 differ.
    assert abs(float(torch.stack(errors).mean())) < 0.03 * (STEPS * 2.0**-12)


def test_the_rule_sees_float32() -> None:
    """A clip to a value between two bfloat16 numbers shows in the float32 result."""
    optimizer = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
    params, grad = torch.zeros(3).bfloat16(), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    _, state = steps(stored(optimizer, param="bfloat16+master"), params, [grad])
    want, _ = steps(optimizer, params.float(), [grad.float()])
    assert_same(state.leaves.stages[-1].master, want)
    assert not torch.equal(want.bfloat16().float(), want)


def test_parameters_of_another_dtype_are_refused() -> None:
    optimizers = [stored(adamw(), param=name) for name in PARAM_STORAGES if name != "float32"]
    for optimizer, dtype in itertools.product(
        optimizers, [torch.float32, torch.float16, torch.complex64]
    ):
        params = {"w": torch.ones(2, dtype=dtype)}
        with pytest.raises(ValueError, match=r"stored_\w+ takes parameters of torch.bfloat16"):
            optimizer.init(params)
        state = optimizer.init({"w": torch.ones(2, dtype=BFLOAT16)})
        with pytest.raises(ValueError, match=f"got {dtype} at 'w'"):
            optimizer.update(params, params, state)
    for dtype in (torch.float64, torch.complex64, BFLOAT16):
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


def test_a_state_on_the_cpu_is_the_same() -> None:
    arguments = {"param": "bfloat16+kahan", "state": "int8+stochastic"}
    near, far = (stored(adamw(), **arguments, state_device=d) for d in (None, "cpu"))
    param, grads = normal(600).bfloat16(), [normal(600, seed=s).bfloat16() for s in range(3)]
    assert_same(steps(near, param, grads), steps(far, param, grads))
    assert {stage.state_device for stage in far.stages} == {"cpu"}


def test_a_state_elsewhere_than_it_belongs_is_refused() -> None:
    optimizer = stored(adamw(), state="bfloat16", state_device="cpu")
    param = torch.ones(3, device="meta")
    state = stored(adamw(), state="bfloat16").init(param)
    with pytest.raises(ValueError, match="its state belongs on cpu"):
        optimizer.update(param, param, state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("state", ["float32", "int8+stochastic", "bfloat16+stochastic"])
def test_a_state_on_the_cpu_of_parameters_on_an_accelerator(state: str) -> None:
    optimizer = stored(adamw(), param="bfloat16+master", state=state, state_device="cpu")
    there = stored(adamw(), param="bfloat16+master", state=state)
    param = normal(600).bfloat16().cuda()
    grads = [normal(600, seed=s).bfloat16().cuda() for s in range(3)]
    got, kept = steps(optimizer, param, grads)
    want, wanted = steps(there, param, grads)
    assert got.device == param.device
    tensors = [t for v in kept.leaves.stages[-1] for t in (v if isinstance(v, list) else [v])]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert_same(got, want)
    assert_same(tensors[0], wanted.leaves.stages[-1][0].cpu())
    optimizer.update_(param, grads[0], optimizer.init(param))
