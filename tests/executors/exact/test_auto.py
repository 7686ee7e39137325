"""What auto picks."""

from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.executors import auto
from functional_optim.executors.auto import AutoKernel

from ...choices import case
from ..rules import RULES
from ..support import lane_of

WORTH = 64
OPTIMIZERS = [sgd(), sgd(momentum=0.9), adamw(), lion(), chain(clip_by_value(1.0), qhm())]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> AutoKernel:
    """In a process that has compiled nothing."""
    monkeypatch.setattr(auto, "WORTH_COMPILING", WORTH)
    monkeypatch.setattr("functional_optim.executors.exact.kernel._PROGRAMS", {})
    return AutoKernel()


def choice(kernel: AutoKernel, optimizer: Optimizer, numel: int) -> Any:
    return kernel.choose(optimizer.stages, lane_of(optimizer, torch.zeros(numel)))


def test_a_loop_is_compiled_where_it_is_worth_it_and_used_wherever_it_is_there(
    kernel: AutoKernel,
) -> None:
    for optimizer in OPTIMIZERS:
        with case(optimizer=optimizer):
            assert choice(kernel, optimizer, WORTH - 1).name == "blocked"
            assert choice(kernel, optimizer, 1).name == "blocked"
            assert choice(kernel, optimizer, WORTH).name == "exact"
            for numel in (1, WORTH - 1, 100 * WORTH):
                assert choice(kernel, optimizer, numel).name == "exact"


def test_what_has_no_formula_is_blocked_and_why_is_said(kernel: AutoKernel) -> None:
    found = choice(kernel, RULES["library"], WORTH)
    assert found.name == "blocked" and "has no formula that is torch's to the bit" in found.reason
