"""Inside of ``torch.nn.Module``, ``torch.optim.Optimizer`` and ``torch.amp.GradScaler``."""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import nn

from functional_optim._torch.missing import Missing, held


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """By name, the entries that are None and those that are there twice among them.

    ``named_children`` leaves both out. Every module has had this dict since torch began.
    """
    return module._modules


def replica_of(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, with dicts of its own of the same parameters, buffers, children.

    Classes are asked for theirs, where threads are to run copies: an LSTM, for one, has a list of
    its parameters beside them. Without that: the copy alone, which is the same for most classes.
    """
    made = getattr(module, "_replicate_for_data_parallel", None)
    found: nn.Module = copy(module) if made is None else made()
    found._parameters = dict(module._parameters)
    if made is None:
        found._buffers, found._modules = dict(module._buffers), dict(module._modules)
    return found


def load_state_dict_hooks(
    optimizer: torch.optim.Optimizer,
) -> tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]]:
    """What users registered to be called before and after ``load_state_dict``.

    For a class that loads in its own way: torch's method calls them, and loads.

    Raises:
        ImportError: torch keeps them otherwise.
    """
    without = Missing(
        "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks",
        "it is not known what is to be called when a state dict is loaded",
        "load checkpoints by load()",
    )
    before = held(optimizer, "_optimizer_load_state_dict_pre_hooks", without)
    after = held(optimizer, "_optimizer_load_state_dict_post_hooks", without)
    return before.values(), after.values()


def scaler_state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """What a GradScaler notes of an optimizer: it cannot be told of gradients not in ``.grad``.

    Raises:
        ImportError: torch keeps it otherwise.
    """
    without = Missing(
        "torch.amp.GradScaler._per_optimizer_states",
        "a scaler cannot be told of gradients that workers have",
        "train in bfloat16, which needs no scaler",
    )
    found: dict[str, Any] = held(scaler, "_per_optimizer_states", without)[id(optimizer)]
    return found


def has_scaled(scaler: Any) -> bool:
    """Whether a GradScaler has scaled a loss. Without torch's word: it may have."""
    scale_now = getattr(scaler, "_get_scale_async", None)
    return scale_now is None or scale_now() is not None
