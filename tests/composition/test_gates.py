"""Gates: stages after a gate run and count steps only if the gate is open."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    accumulate,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    on_global_step,
    partition,
    sam,
    sgd,
)
from functional_optim.schedules import linear

from ..choices import case, each
from ..tensors import assert_same
from .trees import COMPOSED, HOLES, SHAPES, grads_at, kind, params_of, run_of


def mean(steps: range, missing: Mapping[int, str]) -> dict[str, Any]:
    """Return the mean gradients of several batches, or None for a leaf without any gradient."""
    found: dict[str, Any] = {}
    for name in SHAPES:
        total = None
        for step in steps:
            grad = grads_at(step, missing=missing)[name]
            if grad is not None:
                total = (
                    grad * (1 / len(steps))
                    if total is None
                    else total.add(grad, alpha=1 / len(steps))
                )
        found[name] = total
    return found


@each(every=[1, 2, 3], missing=[{}, HOLES])
def test_k_small_batches_are_a_large_one(every: int, missing: Mapping[int, str]) -> None:
    """Accumulation of k small batches matches one large batch in every bit.

    Some gradients are missing in one batch or in all of them.
    """
    missing = {**missing, 0: "scale"}
    inner = chain(clip_by_global_norm(0.5), adamw(0.01))
    params, state = run_of(chain(accumulate(every), inner), 6, missing)
    want: Any = params_of()
    own = inner.init(want)
    for first in range(0, 6, every):
        want, own = inner.update(want, mean(range(first, first + every), missing), own)
    assert_same(params, want)
    for name in SHAPES:
        assert int(state.leaves[name].step) == int(own.leaves[name].step)


def test_a_late_leaf_is_stepped_by_what_it_gave() -> None:
    """A leaf steps by its earlier gradient if the gradient of the last batch is missing."""
    missing = {1: "scale"}
    params = run_of(chain(accumulate(2), sgd(1.0)), 2, missing)[0]
    assert_same(params["scale"], params_of()["scale"] - grads_at(0)["scale"] * 0.5)


def test_a_batch_that_is_begun_is_finished_as_it_was_begun() -> None:
    optimizer, params = chain(accumulate(3), sgd(0.1)), params_of()
    state = optimizer.init(params)
    made = []
    for step in range(7):
        every = 3 if step == 0 else 2
        params, state = optimizer.update(params, grads_at(step), state, every=every)
        made.append(int(state.leaves["scale"].step))
    assert made == [0, 0, 1, 1, 2, 2, 3]


def test_schedules_behind_a_gate_count_its_steps() -> None:
    schedule = linear(1.0, to=0.0, steps=4)
    params: Any = {"w": torch.zeros(1)}
    optimizer = chain(accumulate(2), sgd(schedule))
    state = optimizer.init(params)
    seen = []
    for _ in range(6):
        before = params["w"].item()
        params, state = optimizer.update(params, {"w": torch.ones(1)}, state)
        seen.append(before - params["w"].item())
    assert seen == [0.0, 1.0, 0.0, 0.75, 0.0, 0.5]


@pytest.mark.parametrize("marked", [False, True])
def test_a_schedule_of_a_gate_counts_its_calls(marked: bool) -> None:
    """The schedule of ``rho`` goes on after the gate has opened."""
    rho = linear(0.8, to=0.0, steps=8)
    optimizer = chain(sam(rho=on_global_step(rho) if marked else rho), sgd(0.0))
    params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
    found = []
    for _ in range(4):
        away, state = optimizer.update(params, torch.ones(1), state)
        params, state = optimizer.update(away, torch.ones(1), state)
        found.append(float(away))
    assert found == pytest.approx([0.8, 0.6, 0.4, 0.2])


def bad(step: int, value: float) -> dict[str, Tensor]:
    grads = grads_at(step)
    grads["head.weight"][1, 2] = value
    return grads


@each(value=[math.nan, math.inf, -math.inf])
def test_a_step_by_what_is_not_finite_is_left_out(value: float) -> None:
    """A step with a gradient that is not finite changes no leaf and no step count."""
    optimizer, params = chain(apply_if_finite(2), adamw(0.01)), params_of()
    state = optimizer.init(params)
    for step in range(5):
        grads = bad(step, value) if step in (1, 3) else grads_at(step)
        params, state = optimizer.update(params, grads, state)
    want: Any = params_of()
    own = adamw(0.01).init(want)
    for step in (0, 2, 4):
        want, own = adamw(0.01).update(want, grads_at(step), own)
    assert_same(params, want)
    assert int(state.leaves["scale"].step) == 3
    assert optimizer.shared(state)["apply_if_finite"].skipped == 2


def test_more_than_are_allowed_in_a_row_are_an_error_that_changes_nothing() -> None:
    for in_place in (False, True):
        with case(in_place=in_place):
            optimizer, params = chain(apply_if_finite(1), adamw(0.01)), params_of()
            state = optimizer.init(params)
            optimizer.update_(params, bad(0, math.nan), state)
            step = optimizer.update_ if in_place else optimizer.update
            refusal = r"2 steps in a row .*\(1 elements .*max_skips=1"
            with pytest.raises(FloatingPointError, match=refusal):
                step(params, bad(1, math.nan), state)
            assert_same(params, params_of())
            assert optimizer.shared(state)["apply_if_finite"].skipped == 1


def test_sam_steps_by_the_gradients_at_the_worst_point() -> None:
    """SAM matches its formula in float64, on a quartic with gradients from autograd."""
    shapes = {"a": (3, 2), "b": (4,)}
    params: Any = {name: tensor.double() for name, tensor in params_of(shapes).items()}
    optimizer = chain(sam(0.3), sgd(0.05, momentum=0.9))
    state = optimizer.init(params)
    want, velocity = dict(params), {name: torch.zeros_like(one) for name, one in params.items()}
    for _ in range(3):
        for _ in range(2):
            params, state = optimizer.update(params, slopes(params), state)
        grads = slopes(want)
        norm = torch.cat([one.reshape(-1) for one in grads.values()]).norm()
        there = slopes({n: p + 0.3 * grads[n] / (norm + 1e-12) for n, p in want.items()})
        velocity = {n: 0.9 * v + there[n] for n, v in velocity.items()}
        want = {n: p - 0.05 * velocity[n] for n, p in want.items()}
    for name, one in params.items():
        torch.testing.assert_close(one, want[name], rtol=1e-12, atol=1e-12)
    assert int(state.leaves["a"].step) == 3


@each(executor=["auto", "reference", "blocked"], size=[1e-7, 0.0])
def test_sam_goes_up_along_gradients_too_small_for_a_factor_in_float16(
    executor: str, size: float
) -> None:
    """The factor ``rho / norm`` is above 65504, the largest float16."""
    params = {name: one.half() for name, one in params_of().items()}
    grads = {name: (one * size).half() for name, one in grads_at(0).items()}
    norm = torch.cat([one.double().reshape(-1) for one in grads.values()]).norm()
    want = {n: p + (0.5 * grads[n].double() / (norm + 1e-12)).half() for n, p in params.items()}
    optimizer = chain(sam(0.5), sgd(0.1)).using(executor=executor)
    state = optimizer.init(params)
    assert_same(optimizer.update(params, grads, state)[0], want)
    optimizer.update_(params, grads, state)
    assert_same(params, want)


def slopes(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: one.detach().requires_grad_() for name, one in params.items()}
    loss = torch.stack([(one**4).sum() + one.sum() ** 2 for one in leaves.values()]).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_a_leaf_without_a_gradient_in_one_of_the_calls_is_where_it_was_or_stepped_there() -> None:
    start = params_of()["scale"]
    once = start - 0.1 * grads_at(1)["scale"]
    for missing, want, made in ((2, once - 0.1 * grads_at(3)["scale"], 2), (3, once, 1)):
        with case(missing=missing):
            params, state = run_of(chain(sam(0.1), sgd(0.1)), 4, {missing: "scale"})
            assert_same(params["scale"], want)
            assert int(state.leaves["scale"].step) == made


def test_a_gate_for_some_leaves_lets_the_others_go() -> None:
    optimizer = partition({"matrices": chain(accumulate(2), sgd(0.1)), "rest": sgd(0.1)}, kind)
    params, state = run_of(optimizer, 3)
    assert int(state.leaves["body.weight"].step) == 1
    assert int(state.leaves["scale"].step) == 3
    assert_same(params["scale"], run_of(sgd(0.1), 3)[0]["scale"])


@pytest.mark.parametrize("name", ["accumulate", "finite", "sam"])
def test_a_state_without_its_shared_numbers_is_refused(name: str) -> None:
    optimizer, params = COMPOSED[name](), params_of()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"state\.shared must hold"):
        optimizer.update(params, grads_at(0), state._replace(shared=()))
    leaves = {one: leaf._replace(gates=()) for one, leaf in state.leaves.items()}
    with pytest.raises(ValueError, match="counts at 0 gates"):
        optimizer.update(params, grads_at(0), state._replace(leaves=leaves))


def test_what_needs_one_chain_says_so() -> None:
    optimizer, params = COMPOSED["accumulate"](), params_of()
    for name in ("bind", "script"):
        with case(name=name), pytest.raises(TypeError, match=f"{name} takes .*accumulate keeps"):
            getattr(optimizer, name)(params)


def test_a_late_leaf_is_stepped_by_what_it_kept_in_planned_steps_too() -> None:
    """Planned steps update a leaf by its accumulated gradient if its current gradient is missing.

    A kernel once read that gradient after its memory was freed.
    """
    inner = {"momentum": sgd(lr=0.5, momentum=0.9), "batches": chain(accumulate(2), sgd(lr=1.0))}
    for pattern, elements in itertools.product(("1010", "10101010", "1000100010"), (3, 5_000)):
        for name, one in inner.items():
            optimizer, found = chain(accumulate(2), one), {}
            for executor in ("reference", "auto", "compiled", "blocked"):
                params = {"late": torch.ones(elements), "rest": torch.ones(elements)}
                chosen = optimizer.using(executor=executor)
                state = chosen.init(params)
                for k, has_gradient in enumerate(pattern, 1):
                    late = torch.full((elements,), float(k)) if has_gradient == "1" else None
                    chosen.update_(params, {"late": late, "rest": torch.ones(elements)}, state)
                found[executor] = params["late"]
                with case(pattern=pattern, name=name, elements=elements, executor=executor):
                    assert torch.equal(found[executor], found["reference"])
