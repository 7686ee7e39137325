"""Schedules as data, which give the values of torch's schedulers at every step."""

import pytest
import torch
from torch.optim import lr_scheduler

from functional_optim import one_cycle
from tests.choices import case

from .schedule_twins import TWINS, closed, distance, stepped, values

CLOSED_ULPS = 4.0
"""Distance from torch's formula for any step: both round in a few places."""
STEPPED_ULPS = 64.0
"""Distance after a thousand steps, each of which multiplies a rounded value."""


def test_a_schedule_is_torchs_formula() -> None:
    compared = 0
    for name, twin in TWINS.items():
        formula = closed(twin)
        with case(name=name):
            if formula is not None:
                compared += 1
                assert distance(values(twin), formula) <= CLOSED_ULPS
    assert compared >= 7


def test_a_schedule_is_torchs_scheduler_step_by_step() -> None:
    for name, twin in TWINS.items():
        exact = twin.scheduler in ("OneCycleLR", "LambdaLR")  # independent of earlier steps
        with case(name=name):
            bound = CLOSED_ULPS if exact else STEPPED_ULPS
            assert distance(values(twin), stepped(twin)) <= bound


@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_the_other_way_round_is_torchs_cycle_of_the_momentum(three_phase: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer,
        0.1,
        total_steps=100,
        pct_start=0.4,
        base_momentum=0.8,
        max_momentum=0.95,
        three_phase=three_phase,
    )
    momentum = one_cycle(
        0.8,
        steps=100,
        pct_start=0.4,
        div_factor=0.8 / 0.95,
        final_div_factor=1.0,
        three_phase=three_phase,
    )
    found = [optimizer.param_groups[0]["momentum"]]
    for _ in range(99):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["momentum"])
    assert distance([momentum(float(made)) for made in range(100)], found) <= CLOSED_ULPS
