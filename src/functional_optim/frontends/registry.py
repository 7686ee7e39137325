"""Registry of functional equivalents of torch.optim classes, and of any other keys."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, overload

import torch

from functional_optim import algorithms
from functional_optim.algorithms.lbfgs import lbfgs
from functional_optim.core.closure_optimizer import ClosureOptimizer, refuse_closure
from functional_optim.core.format import format_value
from functional_optim.core.hyper import hash_key
from functional_optim.core.stage import Stage
from functional_optim.frontends.torch_arguments import (
    factory_arguments,
    is_open,
    is_optimizer_class,
    require_arguments,
)
from functional_optim.frontends.torch_functional import install
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.pointwise_check import require_pointwise

Factory = Callable[..., Any]
"""Function that returns an :class:`Optimizer` or a :class:`ClosureOptimizer`."""

_REGISTERED: dict[Hashable, Factory] = {
    torch.optim.SGD: algorithms.sgd,
    torch.optim.Adam: algorithms.adam,
    torch.optim.AdamW: algorithms.adamw,
    torch.optim.Adagrad: algorithms.adagrad,
    torch.optim.Adadelta: algorithms.adadelta,
    torch.optim.Adamax: algorithms.adamax,
    torch.optim.RMSprop: algorithms.rmsprop,
    torch.optim.Rprop: algorithms.rprop,
    torch.optim.Muon: algorithms.muon,
    torch.optim.LBFGS: lbfgs,
    torch.optim.NAdam: algorithms.nadam,
    torch.optim.RAdam: algorithms.radam,
    torch.optim.ASGD: algorithms.asgd,
    torch.optim.Adafactor: algorithms.adafactor,
    torch.optim.SparseAdam: algorithms.sparse_adam,
}

functional_optim_map: Mapping[Hashable, Factory] = MappingProxyType(_REGISTERED)
"""Read-only view of the registry."""


def register_functional_optim(
    key: Hashable, optimizer_factory: Factory, *, replace: bool = False, in_torch: bool = False
) -> None:
    """Register the functional equivalent of an optimizer class.

    Args:
        key: a subclass of torch.optim.Optimizer, or any hashable name.
        optimizer_factory: takes the class's arguments without ``params`` and returns an
            :class:`~functional_optim.Optimizer` (or a
            :class:`~functional_optim.ClosureOptimizer`).
        replace: True to replace an existing entry.
        in_torch: also install it in torch's own map (torch.distributed.optim), so that torch's
            DistributedOptimizer and ZeroRedundancyOptimizer accept ``key``.

    Raises:
        TypeError: the factory cannot be called, or does not take the arguments of the class. The
            error lists the difference.
        ValueError: ``key`` is registered already, here or, with ``in_torch``, in torch's map; or
            the chain is declared pointwise and is not. The error has an example.

    Example::

        >>> from functional_optim import qhm
        >>> class QHM(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=1.0, momentum=0.999, nu=0.7):
        ...         super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})
        >>> register_functional_optim(QHM, qhm)
        >>> as_functional_optim(QHM, lr=0.1).hyper["momentum"]
        0.999
    """
    if not callable(optimizer_factory):
        raise TypeError(
            "optimizer_factory must be callable and return an Optimizer, got "
            f"{format_value(optimizer_factory)}"
        )
    if key in _REGISTERED and not replace:
        raise ValueError(
            f"{_key_name(key)} is registered already, as {format_value(_REGISTERED[key])}; pass "
            "replace=True to put another in its place"
        )
    if is_optimizer_class(key):
        require_arguments(cast("type", key), optimizer_factory)
    try:
        made = optimizer_factory()
    except Exception:  # noqa: BLE001  it may need arguments: call_factory checks the result then
        made = None
    if isinstance(made, Optimizer):
        require_pointwise(made)
    if in_torch:
        refuse_closure(made, "torch.distributed.optim")
        install(key, optimizer_factory, replace=replace)
    _REGISTERED[key] = optimizer_factory


@overload
def as_functional_optim(
    cls: type[torch.optim.LBFGS], *args: Any, **kwargs: Any
) -> ClosureOptimizer: ...
@overload
def as_functional_optim(cls: Any, *args: Any, **kwargs: Any) -> Optimizer: ...
def as_functional_optim(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the functional equivalent of ``cls(params, *args, **kwargs)``.

    Args:
        cls: a registered key. For a torch.optim class, arguments and defaults are those of the
            class.
        args: the arguments of the class after ``params``.
        kwargs: the same, by name. ``foreach``, ``fused``, ``capturable`` and ``differentiable``
            have no effect: in torch they choose an implementation.

    Returns:
        An :class:`~functional_optim.Optimizer`; for torch.optim.LBFGS, a
        :class:`~functional_optim.ClosureOptimizer`.

    Raises:
        ValueError: ``cls`` is not registered, a value is out of bounds, or the chain is declared
            pointwise and is not.
        TypeError: an argument that the class does not have, or a factory that returns no optimizer.

    Example::

        >>> optimizer = as_functional_optim(torch.optim.AdamW, lr=0.1)
        >>> optimizer.hyper["weight_decay"]
        0.01
    """
    return call_factory(factory_of(cls), cls, args, kwargs)


def call_factory(
    factory: Factory, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a factory, as :func:`as_functional_optim` does."""
    positional, named = factory_arguments(key, args, kwargs)
    optimizer = factory(*positional, **named)
    if isinstance(optimizer, Optimizer):
        require_pointwise(optimizer)
    elif not isinstance(optimizer, ClosureOptimizer):
        raise TypeError(
            f"the factory of {_key_name(key)} must return an Optimizer, such as sgd(lr=0.1), got "
            f"{format_value(optimizer)}"
        )
    return optimizer


def has_equivalent(
    cls: type, options: Mapping[str, Any], stages: Sequence[Stage], hypers: Sequence[Any]
) -> bool:
    """Return True if a class is registered, and its equivalent with these options is this chain.

    Options that are no arguments of the class are ignored.
    """
    if cls not in _REGISTERED:
        return False
    arguments = options if is_open(cls) else inspect.signature(cls).parameters
    own = {key: options[key] for key in options if key in arguments}
    try:
        made = call_factory(_REGISTERED[cls], cls, (), own)
    except (TypeError, ValueError):
        return False
    links = made.links if isinstance(made, Optimizer) else ()
    found = tuple([link.stage for link in links]), tuple([link.hyper for link in links])
    return found[0] == tuple(stages) and hash_key(found[1]) == hash_key(tuple(hypers))


def factory_of(key: Any) -> Factory:
    """Return the registered factory of ``key``; raise ValueError if there is none."""
    if key not in _REGISTERED:
        known = ", ".join(_key_name(one) for one in _REGISTERED)
        raise ValueError(
            f"{_key_name(key)} has no functional counterpart; registered are {known}. Add yours "
            "with register_functional_optim(key, factory)"
        )
    return _REGISTERED[key]


def _key_name(key: Any) -> str:
    return key.__name__ if isinstance(key, type) else repr(key)
