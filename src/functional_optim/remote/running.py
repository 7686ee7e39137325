"""Running a module on given parameters, in several threads at once."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from functional_optim._torch import children_of, replica_of


def run(module: nn.Module, parameters: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Call a module with these parameters in place of its own.

    ``torch.func.functional_call`` puts them into the module for that time, so two threads would
    find each other's there. Here it is given a shallow copy of the module. What the forward pass
    writes into buffers is written there; attributes that it sets anew are lost.

    Example::

        >>> import torch
        >>> module = nn.Linear(2, 1, bias=False)
        >>> run(module, {"weight": torch.ones(1, 2)}, (torch.ones(2),), {})
        tensor([2.])
    """
    return functional_call(_replica(module, {}), dict(parameters), args, kwargs)


def _replica(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A shallow copy of a tree of modules, with the same parameters and buffers.

    Args:
        module: the root.
        made: those that were made before: a module may be in several places.
    """
    if module not in made:
        found = made[module] = replica_of(module)
        children = children_of(found)
        for name, one in children.items():
            children[name] = None if one is None else _replica(one, made)
    return made[module]
