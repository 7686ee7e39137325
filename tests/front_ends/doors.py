"""Front-ends over named parameters, which take the gradients of the parameters in each step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from functional_optim import Optimizer, TorchOptimizer
from functional_optim.frontends.local_optimizer import local_optimizer
from hooks.named_groups import NamedGroups
from sharding import ZeroRedundancyOptimizer

Named = Mapping[str, nn.Parameter]


class Sharded(ZeroRedundancyOptimizer):
    """ZeRO optimizer whose ``state_dict`` consolidates the state first."""

    def state_dict(self) -> dict[str, Any]:
        self.consolidate_state_dict()
        return super().state_dict()


class Given:
    """Adapter that passes the gradients of parameters to an optimizer."""

    def __init__(self, optimizer: Any, params: Named, step: Callable[[list[Any]], Any]) -> None:
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict
        self.step = lambda: step([one.grad for one in params.values()])


def local(params: Named, optimizer: Optimizer) -> Given:
    made = local_optimizer(optimizer, list(params.items()))
    return Given(made, params, made.step_by)


def by_hook(params: Named, optimizer: Optimizer) -> Given:
    made = NamedGroups(params, optimizer)
    return Given(made, params, partial(made.step_some, list(params)))


DOORS: dict[str, Callable[[Named, Optimizer], Any]] = {
    "TorchOptimizer": lambda params, one: TorchOptimizer(list(params.items()), one),
    "ZeRO": lambda params, one: Sharded(list(params.items()), one),
    "local_optimizer": local,
    "step_hook": by_hook,
}
