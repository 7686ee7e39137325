"""What auto picks."""

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.engine import coefficients_at
from functional_optim.executors import Leaf, auto
from functional_optim.executors.auto import AutoKernel, Choice
from functional_optim.state import LeafState
from functional_optim.storage import stored

from .rules import RULES

WORTH = 64


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> AutoKernel:
    """In a process that has compiled nothing."""
    monkeypatch.setattr(auto, "WORTH_COMPILING", WORTH)
    monkeypatch.setattr("functional_optim.executors.exact.kernel._PROGRAMS", {})
    return AutoKernel()


def lane_of(optimizer: Optimizer, numel: int, **dtype: torch.dtype) -> Leaf:
    param = torch.zeros(numel, **dtype)
    state: LeafState = optimizer.init(param).leaves
    hypers = tuple(link.hyper for link in optimizer.links)
    resolved, coefficients = coefficients_at(optimizer.stages, hypers, 1.0)
    return Leaf(param, param, state.stages, coefficients, "w", resolved, 1.0, {})


def choice(kernel: AutoKernel, optimizer: Optimizer, numel: int, **dtype: torch.dtype) -> Choice:
    return kernel.choose(optimizer.stages, lane_of(optimizer, numel, **dtype))


OPTIMIZERS = [sgd(), sgd(momentum=0.9), adamw(), lion(), chain(clip_by_value(1.0), qhm())]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_is_compiled_where_it_is_worth_it_and_used_wherever_it_is_there(
    kernel: AutoKernel, optimizer: Optimizer
) -> None:
    assert choice(kernel, optimizer, WORTH - 1).name == "blocked"
    assert choice(kernel, optimizer, 1).name == "blocked"
    assert choice(kernel, optimizer, WORTH).name == "exact"
    for numel in (1, WORTH - 1, 100 * WORTH):
        assert choice(kernel, optimizer, numel).name == "exact"


@pytest.mark.parametrize("numel", [1, WORTH])
def test_what_has_no_formula_is_blocked_and_why_is_said(kernel: AutoKernel, numel: int) -> None:
    found = choice(kernel, RULES["library"], WORTH)
    assert found.name == "blocked" and "has no formula that is torch's to the bit" in found.reason


@pytest.mark.parametrize("optimizer", [sgd(), sgd(momentum=0.9), adamw(), lion()])
@pytest.mark.parametrize("numel", [1, WORTH - 1, WORTH])
def test_what_is_prepared_is_what_is_picked(
    kernel: AutoKernel, optimizer: Optimizer, numel: int
) -> None:
    lane = lane_of(optimizer, numel)
    picked = kernel.choose(optimizer.stages, lane).kernel
    prepared = kernel.prepare(optimizer.stages, lane)
    assert prepared is not None and picked is not None
    own = picked.prepare(optimizer.stages, lane)
    assert own is not None
    assert own._make.__qualname__ == prepared._make.__qualname__


def test_a_short_lane_of_8_bit_state_is_prepared(kernel: AutoKernel) -> None:
    optimizer = stored(lion(0.1), state="int8")
    assert kernel.prepare(optimizer.stages, lane_of(optimizer, 512)) is not None
