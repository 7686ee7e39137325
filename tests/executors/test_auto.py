"""What auto picks where torch has a fused kernel that compiled code overtakes on long lanes."""

import pytest
import torch

from functional_optim import Optimizer, adamw, sgd
from functional_optim.engine import coefficients_at
from functional_optim.executors import Leaf, auto
from functional_optim.executors.auto import AutoKernel, Choice
from functional_optim.state import LeafState

LONG = 64


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> AutoKernel:
    monkeypatch.setattr(auto, "LONG", LONG)
    monkeypatch.setattr(auto, "WORTH_COMPILING", LONG)
    return AutoKernel()


def choice(kernel: AutoKernel, optimizer: Optimizer, numel: int) -> Choice:
    param = torch.zeros(numel)
    state: LeafState = optimizer.init(param).leaves
    hypers = tuple(link.hyper for link in optimizer.links)
    resolved, coefficients = coefficients_at(optimizer.stages, hypers, 1.0)
    lane = Leaf(param, param, state.stages, coefficients, "w", resolved, 1.0)
    return kernel.choose(optimizer.stages, lane)


def answers(kernel: AutoKernel, monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    monkeypatch.setattr(kernel._compiled, "refuses", lambda stages, lane: answer)


@pytest.mark.parametrize("answer", ["it is being compiled", None])
def test_short_lanes_and_kernels_that_keep_up_are_fused(
    kernel: AutoKernel, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    answers(kernel, monkeypatch, answer)
    assert choice(kernel, sgd(momentum=0.9), LONG - 1).name == "fused"
    assert choice(kernel, adamw(), LONG).name == "fused"


def test_a_long_lane_of_sgd_is_fused_until_it_is_compiled(
    kernel: AutoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(kernel, monkeypatch, "it is being compiled")
    first = choice(kernel, sgd(momentum=0.9), LONG)
    assert first.name == "fused" and "it is being compiled" in first.reason
    answers(kernel, monkeypatch, None)
    then = choice(kernel, sgd(momentum=0.9), LONG)
    assert then.name == "compile" and "fused kernel for this chain takes longer" in then.reason
