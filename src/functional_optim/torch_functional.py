"""Our optimizers under the interface of torch's own functional ones.

torch.distributed.optim keeps a map from optimizer classes to "functional optimizers": objects made
from a list of parameters, with ``step(gradients)``, scriptable, with a ``param_group``. Its
DistributedOptimizer and ZeroRedundancyOptimizer take what is in that map.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functional_optim.optimizer import Optimizer
from functional_optim.scripted import ScriptedOptimizer
from functional_optim.state import State
from functional_optim.torch_arguments import factory_arguments


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
        module.param_group = {"params": params, **optimizer.hyper}
        return module


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
