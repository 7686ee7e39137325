"""Selectors by name, and parameters that have only numbers: the error says how to give names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import Optimizer, TorchOptimizer, adamw, chain, freeze, matching
from functional_optim.frontends.local_optimizer import local_optimizer
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld

CHAINS = {
    "override": adamw().override(matching("*.bias"), weight_decay=0.0),
    "override of a path": adamw().override(("bias",), weight_decay=0.0),
    "freeze": chain(freeze(matching("*.bias")), adamw()),
}
MADE: dict[str, Callable[[list[nn.Parameter], Optimizer], Any]] = {
    "TorchOptimizer": TorchOptimizer,
    "local_optimizer": lambda params, optimizer: local_optimizer(optimizer, params),
    "ZeRO": lambda params, optimizer: ZeroRedundancyOptimizer(
        params, optimizer, LocalWorld(1).groups[0]
    ),
}


@pytest.mark.parametrize("door", MADE)
@pytest.mark.parametrize("name", CHAINS)
def test_the_error_asks_for_names(name: str, door: str) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    told = r"selects parameters by their names, .*as model\.named_parameters\(\) does"
    with pytest.raises(ValueError, match=told):
        MADE[door](params, CHAINS[name])
