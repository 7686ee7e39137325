"""Tests of the demo's settings, and of the schedule that both runs compute from them."""

import pytest
import torch

from hooks.demo.settings import PEAK_LEARNING_RATE, Settings
from tests.choices import case


def test_settings_survive_the_way_to_the_ranks() -> None:
    settings = Settings(steps=7, ranks=3, batch_size=2, seed=9, front_end="other")
    assert Settings.from_json(settings.to_json()) == settings


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    for steps in (6, 9, 100, 240):
        rates = [Settings(steps=steps).learning_rate(step) for step in range(steps + 1)]
        top = rates.index(max(rates))
        with case(steps=steps):
            assert rates[top] == pytest.approx(PEAK_LEARNING_RATE)
            assert rates[: top + 1] == sorted(rates[: top + 1])
            assert rates[top:] == sorted(rates[top:], reverse=True)
            assert rates[-1] == pytest.approx(PEAK_LEARNING_RATE / 10)
            assert all(rate > 0 for rate in rates)


def test_a_scheduler_over_the_rate_1_gives_the_schedule_to_the_last_bit() -> None:
    settings = Settings(steps=50)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.learning_rate)
    for step in range(50):
        assert optimizer.param_groups[0]["lr"] == settings.learning_rate(float(step))
        optimizer.step()
        scheduler.step()
