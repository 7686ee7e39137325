"""Trials of whether a chain is pointwise: at its construction, and not at a scheduler's steps."""

from typing import Any

import pytest
import torch

from functional_optim import Optimizer, as_functional_optim
from functional_optim.frontends.local_optimizer import local_optimizer


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """Record the chains that are tried."""
    found: list[Optimizer] = []
    update = Optimizer.update

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found.append(self)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(Optimizer, "update", noted)
    return found


def test_a_chain_is_tried_once_whatever_its_numbers_are(tried: list[Optimizer]) -> None:
    as_functional_optim(torch.optim.Adadelta, lr=0.123)
    tried.clear()
    for lr in (0.1, 0.2, 0.3):
        as_functional_optim(torch.optim.Adadelta, lr=lr)
    assert not tried
    as_functional_optim(torch.optim.Adadelta, rho=0.0, maximize=True, weight_decay=0.1)
    assert tried  # another choice, and a number that was zero


def test_a_scheduler_has_nothing_tried_in_steps(tried: list[Optimizer]) -> None:
    local = local_optimizer(torch.optim.AdamW, [torch.ones(2)], lr=0.1)
    local.step_by([torch.ones(2)])
    tried.clear()
    for _ in range(3):
        local.param_groups[0]["lr"] *= 0.5
        local.step_by([torch.ones(2)])
    assert not tried
