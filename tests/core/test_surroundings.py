"""Global settings of torch that a program may have changed leave results and state alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from functional_optim import adam, chain, clip_by_global_norm, sgd

from .support import CHAINS, VARIANTS, assert_same, noise, steps

EVERY = {**VARIANTS, **CHAINS}


def _train(name: str) -> Any:
    return steps(EVERY[name], {"a": noise(0, 3)}, lambda index: {"a": noise(index + 1, 3)})


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", EVERY)
def test_inference_mode_and_no_grad(name: str) -> None:
    wanted = _train(name)
    with torch.no_grad():
        assert_same(_train(name), wanted)
    with torch.inference_mode():
        result = _train(name)
    assert_same(result, wanted)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("name", EVERY)
def test_the_default_dtype_does_not_matter(name: str) -> None:
    param = noise(0, 3, dtype=torch.float32)
    end, state = steps(EVERY[name], param, lambda i: noise(i + 1, 3, dtype=torch.float32))
    torch.set_default_dtype(torch.float32)
    assert_same(
        (end, state), steps(EVERY[name], param, lambda i: noise(i + 1, 3, dtype=torch.float32))
    )


def test_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        results = {name: _train(name) for name in EVERY}
    finally:
        torch.use_deterministic_algorithms(False)
    for name, result in results.items():
        assert_same(result, _train(name))


def test_the_step_count_stays_on_the_cpu_under_another_default_device() -> None:
    """A count elsewhere costs a synchronisation at every step, or (meta) cannot be read at all."""
    with torch.device("meta"):
        state = adam().init({"a": noise(0, 3)})
    assert state.leaves["a"].step.device.type == "cpu"


@pytest.mark.parametrize("name", EVERY)
def test_a_default_device_does_not_reach_into_a_step(name: str) -> None:
    wanted = _train(name)
    params = {"a": noise(0, 3)}
    state = EVERY[name].init(params)
    for index in range(4):
        grads = {"a": noise(index + 1, 3)}
        with torch.device("meta"):
            params, state = EVERY[name].update(params, grads, state)
    assert_same((params, state), wanted)


def test_parameters_on_meta_give_shapes() -> None:
    """For planning: what a step would make, without memory."""
    param = torch.empty(3, 4, device="meta")
    for optimizer in (sgd(momentum=0.9), adam()):
        state = optimizer.init(param)
        new, new_state = optimizer.update(param, param, state)
        assert new.device.type == "meta"
        assert new.shape == (3, 4)
        assert new_state.leaves.stages[-1][0] is not None
        assert int(new_state.leaves.step) == 1


def test_autocast_changes_nothing() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adam(0.1))
    param, grad = noise(0, 4, 4, dtype=torch.float32), noise(1, 4, 4, dtype=torch.float32)
    state = optimizer.init(param)
    wanted = optimizer.update(param, grad, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(optimizer.update(param, grad, state), wanted)
