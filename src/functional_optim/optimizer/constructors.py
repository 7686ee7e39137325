"""A function where a class of torch.optim stands: does it make one of our optimizers?"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functional_optim.core.brief import brief
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.stage import Stage
from functional_optim.optimizer import Optimizer

PARTS = "a front-end that steps parts of the parameters (ZeRO, DistributedOptimizer, a hook)"
"""The front-ends that refuse an optimizer that evaluates the loss itself."""


def made_without_params(
    constructor: Callable[..., Any], arguments: Mapping[str, Any]
) -> Optimizer | None:
    """Call a function that makes one of our optimizers; return None if it wants parameters.

    One that declares ``-> Optimizer`` is ours. One that declares nothing is asked: ours take
    hyper-parameters only, and whatever makes a torch.optim.Optimizer takes ``params`` first.

    Args:
        constructor: a function, a partial, a method or another thing that can be called, such as
            ``adamw`` or ``lambda lr: chain(clip_by_value(1.0), adamw(lr=lr))``. A class, by this
            function, makes none of ours.
        arguments: by name, without parameters.

    Raises:
        TypeError: it takes neither these arguments alone nor parameters before them, or it makes
            neither kind of optimizer.

    Example::

        >>> from functional_optim import sgd
        >>> made_without_params(lambda lr: sgd(lr=lr, momentum=0.9), {"lr": 0.5}).hyper["lr"]
        0.5
        >>> made_without_params(lambda params, lr: torch.optim.SGD(params, lr=lr), {"lr": 0.5})
    """
    if isinstance(constructor, type):
        return None
    if isinstance(constructor, Stage):
        raise TypeError(
            f"{brief(constructor)} makes a link of a chain, and no optimizer: give "
            f"lambda **hyper: chain({constructor.name}(**hyper))"
        )
    declared, fits = _declared(constructor), _fits(constructor, arguments)
    if declared is torch.optim.Optimizer:
        return None
    if declared is None and (
        _takes_params(constructor)
        or (fits is not None and _fits(constructor, arguments, None) is None)
    ):
        return None  # it wants parameters, whatever it calls them
    if fits is not None:
        raise TypeError(f"{brief(constructor)} makes an optimizer, but {fits}")
    made = constructor(**arguments)
    refuse_closure(made, PARTS)
    if isinstance(made, Optimizer):
        return made
    if isinstance(made, torch.optim.Optimizer):
        return None
    raise TypeError(
        "an optimizer must be a functional_optim.Optimizer, made of hyper-parameters, such as "
        "chain(...), or a torch.optim.Optimizer, made of parameters; "
        f"{brief(constructor)} made {brief(made)}"
    )


def _declared(constructor: Any) -> type | None:
    """Whose optimizer it says that it makes; None where it does not say so."""
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    if not inspect.isroutine(constructor):
        constructor = type(constructor).__call__
    try:
        found = typing.get_type_hints(constructor).get("return")
    except (NameError, TypeError):  # a name for type checkers only; or written in C
        return None
    kinds: tuple[type, ...] = (Optimizer, torch.optim.Optimizer)
    return next((one for one in kinds if isinstance(found, type) and issubclass(found, one)), None)


def _takes_params(constructor: Any) -> bool:
    """Return True if it takes ``params``, or whatever it is given."""
    try:
        given = list(inspect.signature(constructor).parameters.values())
    except (TypeError, ValueError):  # written in C
        return True
    return any(one.name == "params" or one.kind is one.VAR_POSITIONAL for one in given)


def _fits(constructor: Any, arguments: Mapping[str, Any], *positional: Any) -> str | None:
    """None if it can be called so, else why not."""
    try:
        inspect.signature(constructor).bind(*positional, **arguments)
    except TypeError as error:
        return str(error)
    return None
