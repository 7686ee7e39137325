"""Optimizers with the interface of torch's functional optimizers.

torch.distributed.optim has a map from optimizer classes to "functional optimizers". A functional
optimizer is constructed from a list of parameters, can be scripted, and has ``step(gradients)`` and
``param_group``. torch's DistributedOptimizer and ZeroRedundancyOptimizer use this map.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leaf import is_measured
from functional_optim.core.state import State
from functional_optim.frontends.torch_arguments import factory_arguments
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.scripted_optimizer import ScriptedOptimizer


@dataclass(frozen=True)
class TorchFunctional:
    """Constructor of functional optimizers for torch. It can be pickled if ``factory`` can.

    Args:
        key: the key of the factory. If it is a class, arguments and defaults are those of the
            class.
    """

    key: Hashable
    factory: Callable[..., Optimizer]

    def __call__(
        self,
        params: Sequence[Tensor],
        *args: Any,
        _allow_empty_param_list: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return a ScriptModule with ``step(gradients)``, ``step_param`` and ``param_group``.

        torch constructs it without parameters if gradients arrive one by one, as in the DDP hook
        that steps while gradients are reduced. Then ``step_param`` accepts any parameter, and
        creates its state at the first call. This ``step_param`` is Python code, and is not saved
        with the module.
        """
        params = list(params)
        if not params and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        positional, named = factory_arguments(self.key, args, kwargs)
        optimizer = self.factory(*positional, **named)
        if params:
            module = optimizer.script(params).module
        else:
            module = ScriptedOptimizer(optimizer, [], [], [], [], [], State([])).module
            module.step_param = _step_any_param(optimizer)
        module.param_group = {"params": params, **optimizer.hyper}
        return module


def _step_any_param(optimizer: Optimizer) -> Callable[[Tensor, Tensor | None], None]:
    """Return ``step_param`` for any parameter, which keeps the state of each parameter."""
    states: dict[Tensor, State] = {}

    def step_param(param: Tensor, gradient: Tensor | None) -> None:
        measured = [stage.name for stage in optimizer.stages if is_measured(stage)]
        if measured:
            raise ValueError(
                f"{measured[0]} needs the gradients of all parameters at once: make this optimizer "
                "with its parameters, and use step(gradients)"
            )
        if gradient is None:
            return
        state = states.get(param)
        if state is None:
            with torch.no_grad():
                state = optimizer.init(param)
        optimizer.update_(param, gradient, state)
        states[param] = state

    return step_param


def install(key: Hashable, factory: Callable[..., Optimizer], *, replace: bool) -> None:
    """Add a factory to torch's map; raise ValueError if the map has the key already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import utils  # noqa: PLC0415  it imports RPC, and warns on some builds

    torch_map: dict[Any, Any] = utils.functional_optim_map

    if key in torch_map and not replace:
        raise ValueError(
            f"torch's functional map already has {key!r}; pass replace=True to put ours there"
        )
    torch_map[key] = TorchFunctional(key, factory)
