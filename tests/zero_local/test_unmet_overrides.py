"""An override that is meant for no parameter is refused by whatever is made over parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    if_any,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from hooks.named_groups import NamedGroups
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.composition.trees import params_of

CHAINS: dict[str, Callable[[Any], Optimizer]] = {
    "of one": lambda where: adamw(0.1).override(where, weight_decay=0.0),
    "of several": lambda where: chain(accumulate(2), adamw(0.1)).override(where, weight_decay=0.0),
}


def _over_threads(params: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    placement = {name: f"worker{place % 2}" for place, name in enumerate(params)}
    DistributedOptimizer.over_threads(optimizer, list(params.items()), placement).close()


def _sharded(params: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    def made(group: Any) -> None:
        ZeroRedundancyOptimizer(list(params.items()), optimizer, process_group=group)

    LocalWorld(2).run(made)


OVER_PARAMS: dict[str, Callable[[Mapping[str, Tensor], Optimizer], object]] = {
    "TorchOptimizer": lambda params, one: TorchOptimizer(list(params.items()), one),
    "local_optimizer": lambda params, one: local_optimizer(one, list(params.items())),
    "the groups of step_hook": NamedGroups,
    "DistributedOptimizer": _over_threads,
    "ZeroRedundancyOptimizer": _sharded,
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("way", OVER_PARAMS)
def test_a_misspelt_name_is_said(way: str, name: str) -> None:
    params = {key: one.requires_grad_() for key, one in params_of().items()}
    first = next(iter(params))
    with pytest.raises(ValueError, match=rf"meant for no parameter; there are '{first}'"):
        OVER_PARAMS[way](params, CHAINS[name](("heda",)))
    for where in ((first,), if_any(("heda",))):
        with case(where=where):
            OVER_PARAMS[way](params, CHAINS[name](where))


def test_of_parameters_without_names_the_numbers_are_named() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    with pytest.raises(ValueError, match="there are '0', '1', '2'"):
        TorchOptimizer(params, CHAINS["of one"](("weight",)))
    grouped = [{"params": params[:1]}, {"params": params[1:]}]
    TorchOptimizer(grouped, CHAINS["of one"]((2,)))
