"""Inside of ``torch.nn.Module``, ``torch.optim.Optimizer`` and ``torch.amp.GradScaler``."""

from collections.abc import Callable, Iterable
from copy import copy
from functools import wraps
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
    """Return the hooks that users registered before and after ``load_state_dict``.

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


def with_own_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``step`` of an optimizer that holds, or is held by, another optimizer.

    torch calls the hooks of ``register_optimizer_step_pre_hook`` around ``step`` of every class, so
    of two nested optimizers it calls them twice in one step. Around the result only the hooks of
    the optimizer itself are called.

    Raises:
        ImportError: (when it is called) torch keeps the hooks of an optimizer otherwise.
    """

    @wraps(step)
    def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _stepped(step, self, args, kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch then adds no hooks to it
    return wrapper


def step_without_global_hooks(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call ``optimizer.step`` with the hooks of this optimizer, and not with those of all.

    A ``step`` that someone has put on the instance, as schedulers do, is called as it is.

    Raises:
        ImportError: torch keeps the hooks of an optimizer otherwise.
    """
    step = getattr(type(optimizer), "step", None)
    plain = getattr(step, "__wrapped__", None)
    if plain is None or not getattr(step, "hooked", False) or "step" in vars(optimizer):
        return optimizer.step(*args, **kwargs)
    return _stepped(plain, optimizer, args, kwargs)


def _stepped(
    step: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function of an optimizer, and the hooks of the optimizer as torch does."""
    without = Missing(
        "torch.optim.Optimizer._optimizer_step_pre_hooks or _optimizer_step_post_hooks",
        "it is not known what is to be called before and after a step",
        "step with torch's own class",
    )
    given: tuple[Any, ...] = (optimizer, *args)
    before = held(optimizer, "_optimizer_step_pre_hooks", without)
    after = held(optimizer, "_optimizer_step_post_hooks", without)
    for hook in before.values():
        found = hook(optimizer, given, kwargs)
        if found is not None:
            given, kwargs = found
    result = step(*given, **kwargs)
    for hook in after.values():
        hook(optimizer, given, kwargs)
    return result


def scaler_state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return GradScaler's record of an optimizer: it does not know gradients outside ``.grad``.

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
    """Return True if a GradScaler has scaled a loss. Without torch's word: it may have."""
    scale_now = getattr(scaler, "_get_scale_async", None)
    return scale_now is None or scale_now() is not None
