"""Arguments of torch.optim classes and of their factories."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

EXECUTION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Arguments that choose an implementation in torch, and do not change results. They are accepted
and ignored: ``optimizer.using(executor=...)`` chooses the executor."""

FLAT_WAS_REMOVED = (
    "the argument flat of TorchOptimizer was removed: leave it out; to keep parameters, gradients "
    "and state in flat buffers, use optimizer.bind(params)"
)
"""Error for an argument of TorchOptimizer that is gone."""


def is_optimizer_class(key: Any) -> bool:
    """Return True if a value is a subclass of torch.optim.Optimizer."""
    return isinstance(key, type) and issubclass(key, torch.optim.Optimizer)


def is_open(cls: Callable[..., Any]) -> bool:
    """Return True if a class or function takes ``**kwargs``."""
    kinds = [one.kind for one in inspect.signature(cls).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def step_once(probe: torch.optim.Optimizer, param: Tensor) -> None:
    """Step a temporary instance with a gradient of zeros, which is sparse if the class needs that.

    Step hooks of the user are not called.
    """
    step = inspect.unwrap(type(probe).step)
    param.grad = torch.zeros_like(param)
    with torch.no_grad():
        try:
            step(probe)
        except RuntimeError:  # it takes sparse gradients only
            param.grad = param.grad.to_sparse(1)
            step(probe)


def factory_arguments(
    key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a key's factory for ``key(params, *args, **kwargs)``.

    For an optimizer class, the defaults of the class are added, and EXECUTION_OPTIONS are removed.
    For other keys, the arguments are returned unchanged.
    """
    if not is_optimizer_class(key):
        return args, dict(kwargs)
    signature = inspect.signature(key)
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        own = ", ".join(list(signature.parameters)[1:])
        raise TypeError(f"{key.__name__}: {error}; its arguments are params, {own}") from error
    bound.apply_defaults()
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional = tuple(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return positional, {
        name: value for name, value in named.items() if name not in EXECUTION_OPTIONS
    }


def require_arguments(cls: type, factory: Callable[..., Any]) -> None:
    """Raise TypeError unless a factory takes all arguments of a class except ``params``.

    The error lists the arguments that the factory lacks, and required ones that the class lacks.
    """
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return
    own = list(inspect.signature(cls).parameters.values())[1:]
    names = {one.name for one in own if one.kind in _BY_NAME} - set(EXECUTION_OPTIONS)
    by_name = {name for name, one in taken.items() if one.kind in _BY_NAME}
    lacking = [] if is_open(factory) else sorted(names - by_name)
    needed = [
        name
        for name, one in taken.items()
        if one.default is one.empty and one.kind not in _VARIADIC and name not in names
    ]
    if not lacking and (not needed or is_open(cls)):
        return
    told = [f"the factory does not take {', '.join(lacking)}"] if lacking else []
    told += [f"the class does not have {', '.join(needed)}"] if needed else []
    raise TypeError(
        f"the factory of {cls.__name__} must take its arguments after params, since it is called "
        f"with all of them: {'; '.join(told)}. Let the factory take each by name, and refuse a "
        "value that it cannot honour"
    )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
