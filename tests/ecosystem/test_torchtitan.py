"""Tests of the contract of torchtitan's optimizer container: one optimizer per part of a model.

The container is a torch.optim.Optimizer and a Stateful of torch.distributed.checkpoint. It makes
optimizers by ``optimizer_cls(params, **optimizer_kwargs)``, and saves them in flat state dicts
with torch's helpers. Each optimizer has its own scheduler. torchtitan itself needs GPUs and
process groups.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from functional_optim import Optimizer, TorchOptimizer, adamw, freeze, muon, partition
from tests.choices import each

from ..tensors import assert_same
from .support import OPTIMIZERS, QUIET, Model, batches, schedule_of, values

pytestmark = QUIET

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def by_shape() -> Optimizer:
    """Partition by shape, since the container passes parameters without names."""
    parts = {"matrix": muon(lr=0.02), "rest": adamw(lr=0.05), "frozen": freeze()}
    return partition(
        parts,
        lambda _, shape: "frozen" if shape == (1,) else "rest" if len(shape) < 2 else "matrix",
    )


CHOSEN: dict[str, Callable[[], Optimizer]] = {
    "by shape": by_shape,
    **{name: OPTIMIZERS[name] for name in ("adamw", "momentum", "accumulate", "schedule free")},
}


class Container(torch.optim.Optimizer, Stateful):
    """Stand-in for torchtitan's container."""

    def __init__(self, parts: list[nn.Module], cls: Any, options: dict[str, Any]) -> None:
        self.parts = parts
        self.optimizers = [cls([*part.parameters()], **options) for part in parts]
        every = [param for part in parts for param in part.parameters()]
        super().__init__(every, options)

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, one in zip(self.parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, one, options=FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, one in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, one, state_dict, options=FLAT)


class Part(nn.Module):
    """Part of a model that keeps the parameter names of the whole model."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.add_module(name, layer)


class Run:
    """Training run of a model in two parts."""

    def __init__(self, name: str) -> None:
        self.model = Model()
        parts = [Part(key, layer) for key, layer in self.model.named_children()]
        self.optimizers = Container(parts, TorchOptimizer, {"optimizer": CHOSEN[name]()})
        self.schedules = [schedule_of(one) for one in self.optimizers.optimizers]

    def train(self, start: int, stop: int) -> None:
        every = list(batches())
        for step in range(start, stop):
            self.optimizers.zero_grad()
            self.model(**every[step])["loss"].backward()
            self.optimizers.step()
            for one in self.schedules:
                one.step()


@each(name=CHOSEN, stop=[0, 1, 3])
def test_a_run_is_saved_and_resumed(name: str, stop: int, tmp_path_factory: Any) -> None:
    """A run and its schedules continue from torch.distributed.checkpoint, bit for bit."""
    folder = Path(tmp_path_factory.mktemp("checkpoint"))
    whole = Run(name)
    whole.train(0, stop)
    states = {"model": whole.model.state_dict(), "optimizer": whole.optimizers}
    dcp.save(states, checkpoint_id=folder, no_dist=True)
    rates = whole.schedules[0].state_dict()
    whole.train(stop, 6)
    resumed = Run(name)
    states = {"model": resumed.model.state_dict(), "optimizer": resumed.optimizers}
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    for one in resumed.schedules:
        one.load_state_dict(rates)
    resumed.train(stop, 6)
    assert_same(values(resumed.model), values(whole.model))


@each(name=CHOSEN)
def test_the_keys_are_flat_names(name: str) -> None:
    """Each parameter and option has one flat key, for resharding between pipeline stages."""
    run = Run(name)
    run.train(0, 2)
    saved = run.optimizers.state_dict()
    for key in dict(run.model.named_parameters()):
        assert f"param_groups.{key}.lr" in saved
    steps = [int(value) for key, value in saved.items() if key.endswith(".step")]
    assert set(steps) == {1 if name == "accumulate" else 2}
