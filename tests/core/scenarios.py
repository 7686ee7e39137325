"""Scenarios with every kind of leaf, and assertions that hold for all of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.core.aliasing import storage_key
from functional_optim.kernels import ExecutorName

from .support import Frozen, assert_differ, assert_same, noise, tensors, tree

Scenario = Callable[[int], dict[str, Any]]
"""Function that returns new tensors: parameters for step 0, and gradients for later steps."""

STEPS = 3


def _missing(dtype: torch.dtype) -> Scenario:
    """Return a scenario whose vector has no gradient at the second step."""
    return lambda step: {**tree(step, dtype), **({"b": None} if step == 2 else {})}


def _laid_out(dtype: torch.dtype, *, apart: bool) -> Scenario:
    """Return a scenario with transposed and sliced leaves.

    If ``apart``, the gradients are contiguous.
    """

    def make(step: int) -> dict[str, Any]:
        given = {
            "t": noise(step, 5, 17, dtype=dtype).t(),
            "s": noise(step + 9, 9, 7, dtype=dtype)[::2, 1::3],
        }
        return {key: one.contiguous() for key, one in given.items()} if step and apart else given

    return make


def _conjugate(step: int) -> dict[str, Any]:
    """Return parameters for step 0, and for later steps a gradient that is a lazy conjugate."""
    made = noise(step, 4, 3, dtype=torch.complex64)
    return {"z": made.conj() if step else made, "x": noise(step + 5, 5)}


def _extreme(step: int) -> dict[str, Any]:
    """Return pairs of infinities, NaN, denormals, huge numbers, signed zeros, and a plain leaf."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3e38, -1.0]
    )
    grid = torch.cartesian_prod(values, values)
    met = grid[:, 1].roll(7 * step) if step else grid[:, 0]
    return {"p": met.clone(), "plain": noise(step, 3)}


SCENARIOS: dict[str, Scenario] = {
    "float64": _missing(torch.float64),
    "float32": _missing(torch.float32),
    "bfloat16": _missing(torch.bfloat16),
    "float16": _missing(torch.float16),
    "complex64": _missing(torch.complex64),
    "float32, laid out": _laid_out(torch.float32, apart=False),
    "bfloat16, laid apart": _laid_out(torch.bfloat16, apart=True),
    "complex128, laid out": _laid_out(torch.complex128, apart=False),
    "complex64, laid apart": _laid_out(torch.complex64, apart=True),
    "conjugate": _conjugate,
    "extreme": _extreme,
}


def mixed(step: int) -> dict[str, Any]:
    """Return a tree with the leaves of all scenarios but the extreme one."""
    return {
        f"{name}: {key}": leaf
        for name, scenario in SCENARIOS.items()
        for key, leaf in scenario(step).items()
        if name != "extreme"
    }


def assert_steps_alike(optimizer: Optimizer, scenario: Scenario, executor: ExecutorName) -> None:
    """Assert that an executor's ``update`` and ``update_`` give the reference's results.

    ``update`` changes no input and shares no memory with its inputs. ``update_`` keeps its tensors
    and changes no gradient. The check compares every bit, and the version counters of the inputs.
    """
    reference, other = optimizer.using(executor="reference"), optimizer.using(executor=executor)
    params, pure, written = (scenario(0) for _ in range(3))
    state, pure_state, written_state = map(reference.init, (params, pure, written))
    kept = tensors(written, written_state)
    places = [one.data_ptr() for one in kept]
    for step in range(1, STEPS + 1):
        grads = scenario(step)
        before = pure, grads, pure_state
        frozen = Frozen(*before)
        params, state = reference.update(params, grads, state)
        pure, pure_state = other.update(*before)
        assert other.update_(written, grads, written_state) is None
        frozen.assert_untouched()
        assert_same((pure, pure_state), (params, state))
        assert_same((written, written_state), (params, state))
        for key, grad in grads.items():
            if grad is None:  # such a leaf is returned as it is
                assert pure[key] is before[0][key]
                assert pure_state.leaves[key] is before[2].leaves[key]
            else:
                assert_apart((pure[key], pure_state.leaves[key]), before)
    now = tensors(written, written_state)
    assert all(a is b for a, b in zip(now, kept, strict=True))
    assert [one.data_ptr() for one in now] == places
    assert_differ(params, scenario(0))


def assert_apart(made: Any, given: Any) -> None:
    """Assert that results share no memory with arguments or with each other."""
    places = [(storage_key(one), one.storage_offset()) for one in tensors(made)]
    assert len(set(places)) == len(places)
    assert not {storage for storage, _ in places} & set(map(storage_key, tensors(given)))


def as_real(value: Any) -> list[Tensor]:
    """Return all tensors of some trees, complex ones as their real views."""
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors(value)]


def assert_totals_are_taken_in_turn(optimizer: Optimizer) -> None:
    """Assert that each measured stage takes its total, measured with those of earlier stages."""
    params = {"a": noise(0, 3), "b": noise(1, 4)}
    count = sum(stage.name == "clip_by_global_norm" for stage in optimizer.stages)
    state = optimizer.init(params)
    for number in range(2):
        grads = {"a": noise(number + 2, 3), "b": noise(number + 12, 4)}
        totals: list[Tensor] = []
        for _ in range(count):
            totals.append(optimizer.measure(params, grads, state, measured=totals))
        reference = optimizer.using(executor="reference")
        assert_same(totals[0], reference.measure(params, grads, state))
        whole = reference.update(params, grads, state)
        for known in range(count + 1):
            told = optimizer.update(params, grads, state, measured=tuple(totals[:known]))
            assert_same(told, whole)
        params, state = whole
