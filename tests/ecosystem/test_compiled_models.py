"""Tests of models under torch.compile, and of training steps compiled with the optimizer."""

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.choices import each

from ..tensors import assert_same
from .support import QUIET, TORCH, Model, batches, optimizer_of, values

pytestmark = [QUIET, pytest.mark.usefixtures("fresh_compiler")]


def train(model: Any, optimizer: Any, start: int = 0, stop: int = 6) -> None:
    every = list(batches())
    for step in range(start, stop):
        optimizer.zero_grad()
        model(**every[step])["loss"].backward()
        optimizer.step()


@each(name=["partition", "accumulate"])
def test_a_compiled_model_is_trained(name: str) -> None:
    """A compiled model gets the same parameters as the original model."""
    results = []
    for compiled in (False, True):
        model = Model()
        optimizer = optimizer_of(name, model)
        made = torch.compile(model, backend="aot_eager") if compiled else model
        train(made, optimizer)
        results.append(values(model))
    assert_same(*results)


@each(name=TORCH)
def test_it_is_torchs_optimizer(name: str) -> None:
    results = []
    for made in (
        lambda model: optimizer_of(name, model),
        lambda model: TORCH[name](model.parameters()),
    ):
        model = Model()
        train(torch.compile(model, backend="aot_eager"), made(model))
        results.append(values(model))
    assert_same(*results)


@each(name=["adamw", "momentum", "accumulate", "schedule free"])
def test_checkpoints_go_from_a_compiled_model_to_another(name: str) -> None:
    """The optimizer of a compiled module has other parameter names, which must not matter."""
    whole = Model()
    train(whole, optimizer_of(name, whole))
    model = Model()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = optimizer_of(name, compiled)
    train(compiled, optimizer, 0, 3)
    saved = get_optimizer_state_dict(compiled, optimizer)
    assert set(saved["state"]) == set(dict(model.named_parameters()))
    other = optimizer_of(name, model)
    set_optimizer_state_dict(model, other, saved)
    train(model, other, 3, 6)
    assert_same(values(model), values(whole))


@each(name=["adamw", "partition", "accumulate"])
def test_a_step_is_compiled_with_the_model(name: str) -> None:
    """A compiled function contains the forward pass, the backward pass and the step."""
    whole, model = Model(), Model()
    train(whole, optimizer_of(name, whole))
    optimizer = optimizer_of(name, model)

    @torch.compile(backend="aot_eager")
    def trained(batch: Any) -> torch.Tensor:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for batch in list(batches())[:6]:
        trained(batch)
    assert_same(values(model), values(whole))
