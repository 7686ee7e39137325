"""Prodigy, compared with its authors' package; its totals, and steps that move nothing."""

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from prodigyopt import Prodigy
from torch import Tensor, nn

from functional_optim import prodigy, sgd
from functional_optim.algorithms.prodigy import ProdigyShared
from functional_optim.optimizer.pointwise_check import require_pointwise

from ..choices import case, pairs
from .support import Frozen, assert_same, noise, refused

SHAPES: dict[str, tuple[int, ...]] = {"b": (11,), "e": (0, 3), "s": (), "w": (5, 7)}
STEPS = 40
Tree = dict[str, Any]


def start(dtype: torch.dtype = torch.float64) -> Tree:
    return {name: noise(k, *shape, dtype=dtype) for k, (name, shape) in enumerate(SHAPES.items())}


def gradient(params: Tree, step: int) -> Tree:
    """Return the gradients of a noisy square, some of them missing at some steps."""
    missing = {"b"} if step % 3 == 1 else {"w", "s", "e"} if step == 5 else set()
    return {
        name: None
        if name in missing
        else param + 0.5 * noise(100 + 10 * step + k, *param.shape, dtype=param.dtype)
        for k, (name, param) in enumerate(params.items())
    }


def by_the_package(params: list[nn.Parameter], **hyper: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints a text if there is a decay
        return Prodigy(params, **hyper)


def both(dtype: torch.dtype, rate: Callable[[int], float], hyper: Tree) -> tuple[Any, Any, Any]:
    """Return our parameters and state, the package's parameters by name, and its optimizer."""
    optimizer, params = prodigy(**hyper), start(dtype)
    state = optimizer.init(params)
    twins = {name: nn.Parameter(param.clone()) for name, param in params.items()}
    twin = by_the_package(list(twins.values()), **hyper)
    for step in range(STEPS):
        grads = gradient({name: one.detach() for name, one in twins.items()}, step)
        for name, one in twins.items():
            one.grad = None if grads[name] is None else grads[name].clone()
        twin.param_groups[0]["lr"] = rate(step)
        twin.step()
        params, state = optimizer.update(params, grads, state, lr=rate(step))
    return (params, state), twins, twin


def constant(step: int) -> float:
    return 1.0


def warmed_up(step: int) -> float:
    """Return a rate that starts at 0, so that the first step does nothing."""
    return min(1.0, step / 7)


OPTIONS: Tree = {
    "betas": [(0.9, 0.999), (0.0, 0.9), (0.8, 0.5)],
    "beta3": [None, 0.7],
    "weight_decay": [0.0, 0.1],
    "decouple": [True, False],
    "use_bias_correction": [False, True],
    "safeguard_warmup": [False, True],
    "d0": [1e-6, 0.01],
    "d_coef": [1.0, 2.0],
    "growth_rate": [math.inf, 1.3],
    "slice_p": [1, 3],
    "eps": [1e-8, 0.1],
}
FIELDS = ("s", "exp_avg", "exp_avg_sq")
NUMBERS = ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k")


def test_in_double_precision_it_is_its_authors_package_to_the_bit() -> None:
    """All options give the bits of the package in parameters, state and shared numbers.

    The runs have schedules, missing gradients, and steps at which no sum is positive.
    """
    for hyper in pairs(**OPTIONS, rate=[constant, warmed_up]):
        rate = hyper.pop("rate")
        (params, state), twins, twin = both(torch.float64, rate, hyper)
        (shared,) = prodigy(**hyper).shared(state).values()
        with case(rate=rate, **hyper):
            assert_same(params, {name: one.detach() for name, one in twins.items()})
            for name, one in twins.items():
                kept = state.leaves[name].stages[-1]
                entries = twin.state[one]
                for field in FIELDS:
                    ours = getattr(kept, field)
                    for tensor in ours if isinstance(ours, list) else [ours]:
                        assert_same(tensor.reshape(entries[field].shape), entries[field])
                assert ("exp_avg" in entries) == bool(kept.exp_avg)
            for field in NUMBERS:
                assert getattr(shared, field) == twin.param_groups[0][field], field
            assert shared.d > hyper["d0"]


def test_in_single_precision_it_is_the_package_but_for_its_sums() -> None:
    """The package sums in float32, over tensors of 35 elements; our sums are in double precision.

    After 40 steps that depend on each other, its estimate differs by some float32 units in the last
    place. Each step also rounds every parameter by up to half a unit.
    """
    for hyper in pairs(**OPTIONS):
        (params, state), twins, twin = both(torch.float32, constant, hyper)
        (shared,) = prodigy(**hyper).shared(state).values()
        with case(**hyper):
            for name, one in twins.items():
                moved, want = params[name] - start(torch.float32)[name], one.detach()
                want = want - start(torch.float32)[name]
                rounded = STEPS / 2 * torch.finfo(torch.float32).eps * largest(params[name])
                room = SINGLE * largest(want) + rounded
                torch.testing.assert_close(moved, want, rtol=0, atol=room)
            for field in ("d", "d_max"):
                want = twin.param_groups[0][field]
                assert getattr(shared, field) == pytest.approx(want, rel=SINGLE), field


SINGLE = 4e-6
"""Relative distance from the package in float32."""


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def test_totals_of_another_shape_are_refused() -> None:
    optimizer, params = prodigy(), {"w": torch.ones(3)}
    state = optimizer.init(params)
    total = optimizer.measure(params, params, state)
    assert (total.shape, total.dtype) == ((2,), torch.float64)
    frozen = Frozen(params, state)
    for wrong in (total[0], total[:1], torch.ones(3).double(), [1.0, 2.0], 1.0):
        for way in (optimizer.update, optimizer.update_):
            with refused(TypeError, "for prodigy that is a vector of 2 sums", wrong=wrong, way=way):
                way(params, params, state, measured=[wrong])
    with pytest.raises(ValueError, match=r"at most 1 totals, got 2; .* need a total: prodigy$"):
        optimizer.update(params, params, state, measured=[total, total])
    with pytest.raises(ValueError, match="at most 0 totals if one more is to be computed"):
        optimizer.measure(params, params, state, measured=[total])
    frozen.assert_untouched()


def test_a_step_of_zeros_moves_and_counts_nothing() -> None:
    """Zero gradients change no parameter, and a step at lr 0 changes no state, either."""
    optimizer, params = prodigy(weight_decay=0.5, use_bias_correction=True), start()
    state = optimizer.init(params)
    zeros = {name: torch.zeros_like(param) for name, param in params.items()}
    for rate in (1.0, 0.0):
        made, after = optimizer.update(params, zeros, state, lr=rate)
        with case(rate=rate):
            assert_same(made, params)
            assert optimizer.shared(after)["prodigy"] == ProdigyShared(
                1e-6, 1e-6, 0.0, 0.0, 1e-6, 0.0, 1e-6
            )
    rested, after = optimizer.update(params, params, state, lr=0.0)
    assert_same(rested, params)
    assert_same(
        [one.stages for one in after.leaves.values()], [one.stages for one in state.leaves.values()]
    )


def test_a_tensor_that_is_not_finite_has_no_part_in_the_estimate() -> None:
    for bad in (math.nan, math.inf):
        optimizer = prodigy(d0=0.1)
        ends = []
        for poison in (None, torch.full((3,), bad, dtype=torch.float64)):
            params = {"a": noise(0, 4), "bad": torch.ones(3).double()}
            state = optimizer.init(params)
            for step in range(5):
                grads = {"a": params["a"] + noise(step, 4), "bad": poison}
                params, state = optimizer.update(params, grads, state)
            ends.append((params["a"], state.leaves["a"], state.shared))
        with case(bad=bad):
            assert_same(*ends)


def test_another_slice_keeps_another_state() -> None:
    """The change is refused until the optimizer is built again."""
    for optimizer, slice_p in ((prodigy(), 2), (prodigy(slice_p=2), 1)):
        with refused(ValueError, r"build prodigy\(.*\) anew", slice_p=slice_p):
            optimizer.replace(slice_p=slice_p)
    kept = prodigy(slice_p=4).replace(slice_p=3).init(noise(0, 5, 2)).leaves.stages[-1]
    assert [tuple(one.shape) for one in (kept.s, kept.p0, kept.exp_avg_sq)] == [(4,), (4,), (5, 2)]


def test_gradients_that_never_turn_end_in_an_error_that_says_so() -> None:
    """The error comes before anything is written, in pure steps and in place."""
    optimizer, grads = prodigy(), [torch.ones(3), torch.ones(2)]
    params: Any = [torch.zeros(3), torch.zeros(2)]
    state = optimizer.init(params)
    with pytest.raises(FloatingPointError, match=r"d has grown to .* growth_rate"):  # noqa: PT012
        for _ in range(300):
            before = optree.tree_map(torch.clone, [params, state])
            optimizer.update_(params, grads, state)
    assert_same([params, state], before)
    with pytest.raises(FloatingPointError, match="overflow float32"):
        optimizer.update(params, grads, state)
    for _ in range(2):  # the way out
        optimizer.update_(params, grads, state, growth_rate=1.0)


def test_it_is_pointwise_though_it_sums() -> None:
    """Parts step with the sums of the whole, so the check does not try parts without sums.

    The third decay is the root of the second, even for a tensor or a schedule.
    """
    require_pointwise(prodigy())
    require_pointwise(prodigy(betas=(0.0, 0.9), d0=0.1))
    require_pointwise(sgd())
    betas: list[Any] = [0.81, torch.tensor(0.81, dtype=torch.float64), lambda made: 0.81]
    ends = []
    for beta_2 in betas:
        optimizer, params = prodigy(betas=(0.9, beta_2), d0=0.1), noise(0, 4)
        state = optimizer.init(params)
        for _ in range(3):
            params, state = optimizer.update(params, params, state)
        ends.append(params)
    torch.testing.assert_close(ends[1:], ends[:1] * 2, rtol=1e-14, atol=0)
    assert prodigy(betas=(0.9, 0.81)).hyper["beta3"] == pytest.approx(0.9)
