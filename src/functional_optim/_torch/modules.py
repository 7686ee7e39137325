"""Private names of torch's modules, optimizers, GradScaler, and checkpoint metadata."""

from collections.abc import Callable, Iterable
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import nn

from functional_optim._torch.missing_name import MissingName, get_private


def get_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return all children by name, including None and children that occur twice.

    ``named_children`` leaves both out.
    """
    return module._modules


def copy_module(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module, with new dicts of the same parameters, buffers, children.

    torch's method for data parallelism also copies other references to parameters, such as the list
    of an LSTM. Without the method, ``copy.copy`` is used, which is equal for most classes.
    """
    replicate = getattr(module, "_replicate_for_data_parallel", None)
    replica: nn.Module = copy(module) if replicate is None else replicate()
    replica._parameters = dict(module._parameters)
    if replicate is None:
        replica._buffers, replica._modules = dict(module._buffers), dict(module._modules)
    return replica


def load_state_dict_hooks(
    optimizer: torch.optim.Optimizer,
) -> tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]]:
    """Return the hooks before and after ``load_state_dict``, for a class with its own method."""
    without = MissingName(
        "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks",
        "it is not known what is to be called when a state dict is loaded",
        "load checkpoints by load()",
    )
    before = get_private(optimizer, "_optimizer_load_state_dict_pre_hooks", without)
    after = get_private(optimizer, "_optimizer_load_state_dict_post_hooks", without)
    return before.values(), after.values()


def with_own_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``step`` of nested optimizers to run only the optimizer's own hooks.

    torch runs the global hooks of ``register_optimizer_step_pre_hook`` around ``step`` of every
    class, so it would run them twice for two nested optimizers.
    """

    @wraps(step)
    def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _step_with_hooks(step, self, args, kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # so that torch adds no hooks
    return wrapper


def step_without_global_hooks(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call ``optimizer.step`` with the hooks of this optimizer, without global hooks.

    A ``step`` attribute of the instance, as schedulers set, is called unchanged.
    """
    step = getattr(type(optimizer), "step", None)
    plain = getattr(step, "__wrapped__", None)
    if plain is None or not getattr(step, "hooked", False) or "step" in vars(optimizer):
        return optimizer.step(*args, **kwargs)
    return _step_with_hooks(plain, optimizer, args, kwargs)


def _step_with_hooks(
    step: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function of an optimizer between the optimizer's step hooks, as torch does."""
    without = MissingName(
        "torch.optim.Optimizer._optimizer_step_pre_hooks or _optimizer_step_post_hooks",
        "it is not known what is to be called before and after a step",
        "step with torch's own class",
    )
    given: tuple[Any, ...] = (optimizer, *args)
    before = get_private(optimizer, "_optimizer_step_pre_hooks", without)
    after = get_private(optimizer, "_optimizer_step_post_hooks", without)
    for hook in before.values():
        found = hook(optimizer, given, kwargs)
        if found is not None:
            given, kwargs = found
    result = step(*given, **kwargs)
    for hook in after.values():
        hook(optimizer, given, kwargs)
    return result


def scaler_state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return GradScaler's record of an optimizer, for gradients outside of ``.grad``."""
    without = MissingName(
        "torch.amp.GradScaler._per_optimizer_states",
        "a scaler cannot be told of gradients that workers have",
        "train in bfloat16, which needs no scaler",
    )
    found: dict[str, Any] = get_private(scaler, "_per_optimizer_states", without)[id(optimizer)]
    return found


def has_scaled(scaler: Any) -> bool:
    """Return True if a GradScaler has scaled a loss, or if torch does not say it."""
    scale_now = getattr(scaler, "_get_scale_async", None)
    return scale_now is None or scale_now() is not None


def names_in_metadata() -> dict[tuple[str, str], Any]:
    """Return private objects in the pickled metadata of checkpoints, by module and name.

    Unpickling them runs no other code.
    """
    from torch.distributed.checkpoint import filesystem

    names = ((torch.serialization, "_get_layout"), (filesystem, "_StorageInfo"))
    return {
        (owner.__name__, name): get_private(
            owner,
            name,
            MissingName(
                f"{owner.__name__}.{name}",
                "metadata of a checkpoint cannot be read without running code of the file",
                "read checkpoints that you trust by torch's FileSystemReader",
            ),
        )
        for owner, name in names
    }
