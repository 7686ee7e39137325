"""Tests of Hugging Face Accelerate: prepared, saved and resumed runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.choices import each

from ..tensors import assert_same
from .support import (
    OPTIMIZERS,
    QUIET,
    TORCH,
    Model,
    batches,
    optimizer_of,
    plainly,
    schedule_of,
    values,
)

pytestmark = QUIET


@pytest.fixture(autouse=True)
def no_accelerator_of_other_tests() -> Any:
    """Reset the global state of Accelerate, which is stored in classes."""
    yield
    for one in (AcceleratorState, GradientState, PartialState):
        one._reset_state()


class Run:
    """Prepared model, optimizer, data and schedule."""

    def __init__(self, optimizer: Any, *, accumulated: int = 1) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        self.model = Model()
        made = optimizer(self.model)
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            self.model, made, batches(), schedule_of(made)
        )

    def train(self, start: int, stop: int) -> None:
        every = list(self.data)
        for step in range(start, stop):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**every[step % len(every)])["loss"])
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()


@each(name=OPTIMIZERS)
def test_it_is_the_run_without_it(name: str) -> None:
    alone = Model()
    plainly(optimizer_of(name, alone), alone, 8)
    run = Run(lambda model: optimizer_of(name, model))
    run.train(0, 8)
    assert_same(values(run.model), values(alone))
    assert run.accelerator.unwrap_model(run.model) is run.model


@each(name=TORCH, accumulated=[1, 2])
def test_it_is_torchs_optimizer(name: str, accumulated: int) -> None:
    """The bits are those of torch's optimizer, even if Accelerate accumulates gradients."""
    results = []
    for made in (
        lambda model: optimizer_of(name, model),
        lambda model: TORCH[name](model.parameters()),
    ):
        run = Run(made, accumulated=accumulated)
        run.train(0, 8)
        results.append(values(run.model))
    assert_same(*results)


@each(name=OPTIMIZERS, stop=[0, 3, 5])
def test_a_run_is_saved_and_resumed(name: str, stop: int, tmp_path_factory: Any) -> None:
    """Model, optimizer state and rates of a resumed run are those of the whole run, bit for bit."""
    folder = Path(tmp_path_factory.mktemp("state"))
    whole = Run(lambda model: optimizer_of(name, model))
    whole.train(0, stop)
    whole.accelerator.save_state(str(folder))
    whole.train(stop, 8)
    resumed = Run(lambda model: optimizer_of(name, model))
    resumed.accelerator.load_state(str(folder))
    resumed.train(stop, 8)
    assert_same(values(resumed.model), values(whole.model))
    assert_same(resumed.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"])
    rates = [[group["lr"] for group in one.optimizer.param_groups] for one in (resumed, whole)]
    assert rates[0] == rates[1]


def test_gradients_are_clipped_by_accelerate() -> None:
    results = []
    for made in (
        lambda model: optimizer_of("adamw", model),
        lambda model: TORCH["adamw"](model.parameters()),
    ):
        run = Run(made)
        every = list(run.data)
        for step in range(4):
            run.accelerator.backward(run.model(**every[step])["loss"])
            run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert isinstance(run.optimizer, torch.optim.Optimizer)
        results.append(values(run.model))
    assert_same(*results)
