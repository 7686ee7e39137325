"""Tests of which parameters a forward pass waits for, and when, while they are gathered."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from hooks.zero.forward_waits import ForwardWaits
from tests.ddp import models

from .cases import Attention


class Watched:
    """Module that records the names of the parameters that it waits for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = {id(param): name for name, param in module.named_parameters()}
        self.waited: list[set[str]] = []
        self.waits = ForwardWaits(module, self.names, self.wait_for)

    def wait_for(self, params: Iterable[Tensor]) -> None:
        self.waited.append({self.names[id(param)] for param in params})

    def forward(self, x: Tensor) -> list[set[str]]:
        """Run forward; return the parameters of each wait, without empty waits."""
        self.waited.clear()
        self.module(x, 0, 0)
        return [names for names in self.waited if names]


X = torch.ones(2, models.WIDTH)


def test_each_module_waits_for_its_own() -> None:
    watched = Watched(models.Tower())
    every = set(watched.names.values())
    assert watched.forward(X)[0] == every  # no module is known to be called yet
    later = watched.forward(X)
    assert later == [{f"layers.{i}.weight", f"layers.{i}.bias"} for i in range(6)]


def test_parameters_of_a_module_that_is_never_called() -> None:
    """``nn.MultiheadAttention`` reads the weight of its module out_proj, but never calls it."""
    watched = Watched(Attention())
    watched.forward(X)
    first, *later = watched.forward(X)
    out = {"attention.out_proj.weight", "attention.out_proj.bias"}
    assert first == out
    assert {"attention.in_proj_weight", "attention.in_proj_bias"} | out in later


def test_a_module_that_is_left_out_once_is_waited_for_early_ever_after() -> None:
    class Sometimes(models.Tower):
        skip = False

        def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
            for layer in self.layers[: 5 if self.skip else 6]:
                x = layer(x)
            return x

    watched = Watched(Sometimes())
    watched.forward(X)
    assert len(watched.forward(X)[0]) == 2
    watched.module.skip = True
    watched.forward(X)
    watched.module.skip = False
    assert watched.forward(X)[0] == {"layers.5.weight", "layers.5.bias"}


def test_a_part_that_is_called_by_itself() -> None:
    watched = Watched(Attention())
    watched.waited.clear()
    x = X.unsqueeze(1)
    watched.module.attention(x, x, x, need_weights=False)
    assert {name for names in watched.waited for name in names} >= {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }


@pytest.mark.parametrize("load", [False, True])
def test_state_dicts(load: bool) -> None:
    watched = Watched(models.Tower())
    state = watched.module.state_dict()
    assert set().union(*watched.waited) == set(state)
    if load:
        watched.waited.clear()
        watched.module.load_state_dict(state)
        assert set().union(*watched.waited) == set(state)
