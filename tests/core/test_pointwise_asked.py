"""Trials of whether a chain is pointwise: at its construction, and not at a scheduler's steps."""

import pytest
import torch

from functional_optim import as_functional_optim
from functional_optim.core.stage import Link
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.optimizer import pointwise_check


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    """Record the stages that are tried."""
    found: list[Link] = []
    check = pointwise_check._check

    def noted(link: Link) -> None:
        found.append(link)
        check(link)

    monkeypatch.setattr(pointwise_check, "_check", noted)
    return found


def test_a_chain_is_tried_once_whatever_its_numbers_are(tried: list[Link]) -> None:
    as_functional_optim(torch.optim.Adadelta, lr=0.123)
    tried.clear()
    for lr in (0.1, 0.2, 0.3):
        as_functional_optim(torch.optim.Adadelta, lr=lr)
    assert not tried
    as_functional_optim(torch.optim.Adadelta, rho=0.0, maximize=True, weight_decay=0.1)
    assert tried  # another choice, and a number that was zero


def test_a_scheduler_has_nothing_tried_in_steps(tried: list[Link]) -> None:
    local = local_optimizer(torch.optim.AdamW, [torch.ones(2)], lr=0.1)
    local.step_by([torch.ones(2)])
    tried.clear()
    for _ in range(3):
        local.param_groups[0]["lr"] *= 0.5
        local.step_by([torch.ones(2)])
    assert not tried
