"""What auto picks."""

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.engine import coefficients_at
from functional_optim.executors import Leaf, auto
from functional_optim.executors.auto import AutoKernel, Choice
from functional_optim.state import LeafState
from functional_optim.storage import stored

FEW, WORTH = 32, 64


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> AutoKernel:
    monkeypatch.setattr(auto, "WORTH_CALLING", FEW)
    monkeypatch.setattr(auto, "WORTH_COMPILING", WORTH)
    kernel = AutoKernel()
    answers(kernel, monkeypatch, "it is being compiled")
    return kernel


def lane_of(optimizer: Optimizer, numel: int, **dtype: torch.dtype) -> Leaf:
    param = torch.zeros(numel, **dtype)
    state: LeafState = optimizer.init(param).leaves
    hypers = tuple(link.hyper for link in optimizer.links)
    resolved, coefficients = coefficients_at(optimizer.stages, hypers, 1.0)
    return Leaf(param, param, state.stages, coefficients, "w", resolved, 1.0, {})


def choice(kernel: AutoKernel, optimizer: Optimizer, numel: int, **dtype: torch.dtype) -> Choice:
    return kernel.choose(optimizer.stages, lane_of(optimizer, numel, **dtype))


def answers(kernel: AutoKernel, monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    monkeypatch.setattr(kernel._compiled, "refuses", lambda stages, lane: answer)


@pytest.mark.parametrize("numel", [1, FEW, WORTH, 100 * WORTH])
@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adamw()])
def test_what_has_a_fused_kernel_is_fused_at_any_length(
    kernel: AutoKernel, optimizer: Optimizer, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(kernel, monkeypatch, None)
    assert choice(kernel, optimizer, numel).name == "fused"


@pytest.mark.parametrize("optimizer", [sgd(), sgd(weight_decay=0.1), sgd(maximize=True)])
def test_one_call_or_two_on_few_elements_are_made_as_they_stand(
    kernel: AutoKernel, optimizer: Optimizer
) -> None:
    few, many = (choice(kernel, optimizer, numel) for numel in (FEW - 1, FEW))
    assert few.name == "blocked" and "few elements" in few.reason
    assert many.name == "fused"


@pytest.mark.parametrize("optimizer", [lion(), chain(clip_by_value(1.0), qhm())])
def test_the_rest_is_compiled_once_that_is_done_and_worth_it(
    kernel: AutoKernel, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice(kernel, optimizer, WORTH - 1).name == "blocked"
    first = choice(kernel, optimizer, WORTH)
    assert first.name == "blocked" and "it is being compiled" in first.reason
    answers(kernel, monkeypatch, None)
    assert choice(kernel, optimizer, WORTH).name == "compile"
    assert choice(kernel, optimizer, WORTH - 1).name == "blocked"


def test_what_torch_has_no_fused_kernel_for_in_a_dtype_is_no_fused(kernel: AutoKernel) -> None:
    assert choice(kernel, sgd(momentum=0.9), WORTH, dtype=torch.bfloat16).name == "blocked"


@pytest.mark.parametrize("optimizer", [sgd(), sgd(momentum=0.9), adamw(), lion()])
@pytest.mark.parametrize("numel", [1, FEW - 1, FEW, WORTH])
def test_what_is_prepared_is_what_is_picked(
    kernel: AutoKernel, optimizer: Optimizer, numel: int
) -> None:
    lane = lane_of(optimizer, numel)
    picked = kernel.choose(optimizer.stages, lane).kernel
    prepared = kernel.prepare(optimizer.stages, lane)
    if optimizer.stages[-1].name == "lion" and numel >= FEW:
        assert prepared is None  # it may be compiled one day
        return
    assert prepared is not None and picked is not None
    own = picked.prepare(optimizer.stages, lane)
    assert own is not None
    assert own._make.__qualname__ == prepared._make.__qualname__


def test_a_short_lane_of_8_bit_state_may_be_compiled_one_day(kernel: AutoKernel) -> None:
    optimizer = stored(lion(0.1), state="int8")
    assert kernel.prepare(optimizer.stages, lane_of(optimizer, 512)) is None
