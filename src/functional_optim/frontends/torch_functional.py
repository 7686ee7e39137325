"""Our optimizers under the interface of torch's own functional ones.

torch.distributed.optim keeps a map from optimizer classes to "functional optimizers": objects made
from a list of parameters, with ``step(gradients)``, scriptable, with a ``param_group``. Its
DistributedOptimizer and ZeroRedundancyOptimizer take what is in that map.
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
from functional_optim.optimizer.scripted import ScriptedOptimizer


@dataclass(frozen=True)
class TorchFunctional:
    """A constructor of functional optimizers in torch's sense; can be pickled if ``factory`` can.

    Args:
        key: what the factory is registered under; of a class, arguments and defaults are its own.
        factory: returns the Optimizer.
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
        """A ScriptModule with ``step(gradients)``, ``step_param`` and ``param_group``.

        Made without parameters, as torch does where gradients arrive one by one (in the hook of
        DDP that steps while gradients are reduced), ``step_param`` takes any parameter, and makes
        its state when it first comes. That is Python's, and not in a module that is saved.

        Raises:
            ValueError: no parameters, where that is not allowed.
        """
        params = list(params)
        if not params and not _allow_empty_param_list:
            raise ValueError("optimizer got an empty parameter list")
        positional, named = factory_arguments(self.key, args, kwargs)
        optimizer = self.factory(*positional, **named)
        if params:
            module = optimizer.script(params).module
        else:
            module = ScriptedOptimizer([optimizer.links], [], [], [], [], State([])).module
            module.step_param = _AnyParam(optimizer)
        module.param_group = {"params": params, **optimizer.hyper}
        return module


class _AnyParam:
    """``step_param`` of parameters that nobody has announced.

    Args:
        optimizer: steps each of them, alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Tensor, State] = {}

    def __call__(self, param: Tensor, gradient: Tensor | None) -> None:
        """Step one parameter; do nothing if its gradient is None.

        Raises:
            ValueError: a gradient that does not fit, or a chain that needs all gradients at once.
        """
        measured = [stage.name for stage in self._optimizer.stages if is_measured(stage)]
        if measured:
            raise ValueError(
                f"{measured[0]} needs the gradients of all parameters at once: make this optimizer "
                "with its parameters, and use step(gradients)"
            )
        if gradient is None:
            return
        state = self._states.get(param)
        if state is None:
            with torch.no_grad():
                state = self._optimizer.init(param)
        self._optimizer.update_(param, gradient, state)
        self._states[param] = state


def install(key: Hashable, factory: Callable[..., Optimizer], *, replace: bool) -> None:
    """Put a factory into torch's functional map, under ``key``.

    Raises:
        ValueError: torch's map has the key already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import utils  # noqa: PLC0415  it brings in RPC, and warns on some builds

    torch_map: dict[Any, Any] = utils.functional_optim_map

    if key in torch_map and not replace:
        raise ValueError(
            f"torch's functional map already has {key!r}; pass replace=True to put ours there"
        )
    torch_map[key] = TorchFunctional(key, factory)
