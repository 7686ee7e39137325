"""Optimizers that step during backward: each parameter as soon as its gradient is complete.

The gradient is freed at once. So besides the memory of backward, at most one gradient exists.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, TorchOptimizer
from functional_optim._torch.distributed import (
    IN_BACKWARD_OPTIMIZERS,
    OPTIMIZER_CLASSES,
    OPTIMIZER_KWARGS,
)
from functional_optim.engine.calls import disable_compile
from functional_optim.engine.messages import format_value
from functional_optim.engine.recipes import call_constructor
from functional_optim.engine.stages import (
    has_shared_state,
    is_measured,
    refuse_closure,
    require_gradients_alone,
)
from functional_optim.engine.tensors import check_no_overlap
from hooks.in_backward_ddp import (
    check_ddp_argument,
    is_stepped_by_ddp,
    record_of,
    reduce_in_backward,
    register_ddp_hook,
    watch_modules,
)

__all__ = ["apply_optimizer_in_backward", "get_in_backward_optimizers", "reduce_in_backward"]

Make = Callable[..., torch.optim.Optimizer]


class _Request(NamedTuple):
    """A parameter, and the arguments of its optimizer."""

    name: str
    param: Tensor
    kwargs: dict[str, Any]


def apply_optimizer_in_backward(
    optimizer_class: Any,
    params: Iterable[Any],
    optimizer_kwargs: Mapping[str, Any],
    register_hook: bool = True,
    *,
    ddp: DistributedDataParallel | Literal[False] | None = None,
) -> None:
    """Step each parameter during ``backward()``, by a separate optimizer.

    When a parameter's gradient is accumulated, all optimizers applied to the parameter step, in
    the order in which they were applied. Then its ``.grad`` becomes None. There is no ``step()`` to
    call. With ``g_t`` the gradient of one backward pass, each pass is one step,
    ``p_t = step(p_{t-1}, g_t)``, with the result of that optimizer over all parameters.

    The optimizers are in ``param._in_backward_optimizers``, for learning-rate schedulers and
    checkpoints (see :func:`~hooks.in_backward.get_in_backward_optimizers`).

    **Every backward pass is a step.** Gradients cannot be accumulated over several passes, and
    gradients of a loss scaled by a GradScaler are not unscaled. If re-entrant checkpointing brings
    a parameter into several passes, each pass steps it.

    **With DistributedDataParallel**, pass the module as ``ddp``, or call
    :func:`~hooks.in_backward.reduce_in_backward` after wrapping. DDP's communication hook, which
    must be free, then steps parameters by the mean gradient over all ranks, and gradients are None
    at the end of backward. Under ``no_sync`` gradients accumulate as usual, and the next pass
    reduces and steps them. A parameter that DDP ignores is stepped by its own rank's gradient.

    Args:
        optimizer_class: a torch.optim class; or an :class:`~functional_optim.Optimizer`, such as
            ``adamw(lr=0.1)``, or its constructor, such as ``adamw``.
        params: an iterable of parameters, of (name, parameter) pairs, or of dicts with "params" and
            the arguments that differ for that group. A parameter that comes twice gets two
            optimizers, as torch.optim steps it twice.
        optimizer_kwargs: the class's or constructor's arguments without ``params``; for an
            Optimizer, hyper-parameters to replace.
        register_hook: False to build and store the optimizers, and let only DDP step them.
        ddp: the DistributedDataParallel module that reduces the gradients of these parameters;
            False if there is none. Required if there is a process group, except for parameters of
            a module that was passed before.

    Raises:
        TypeError: ``params`` has other elements; ``optimizer_class`` is something else, or takes
            inputs other than gradients; ``ddp`` is something else.
        ValueError: ``ddp`` is missing; no parameter; a parameter that requires no gradient or is no
            leaf; parameters that share a part of their memory; an optimizer that needs all
            gradients at once (clipping by global norm) or a closure (LBFGS).
        RuntimeError: DDP has another communication hook; (from backward) DDP should reduce a
            gradient and does not: the wrapped module was called without DDP, or this function was
            called after DDP's forward pass, or DDP was created later and never passed.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> model = torch.nn.Linear(2, 1)
        >>> apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.5})
        >>> apply_optimizer_in_backward(adamw, [model.bias], {"lr": 0.1})
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.tolist(), model.weight.grad
        ([[0.5, 0.5]], None)
    """
    requests = list(_requests(params, optimizer_kwargs))
    if not requests:
        raise ValueError("params has no parameter; was it a generator that was used up before?")
    check_no_overlap(
        [request.param for request in requests], lambda: [request.name for request in requests]
    )
    make = _get_constructor(optimizer_class)
    optimizers = [_build_optimizer(make, request) for request in requests]
    check_ddp_argument(ddp, {request.name: request.param for request in requests})
    params = [request.param for request in requests]
    stepper = register_ddp_hook(ddp, params) if isinstance(ddp, DistributedDataParallel) else None
    watch_modules()
    for request, optimizer in zip(requests, optimizers, strict=True):
        _attach(request, optimizer, optimizer_class)
        record = record_of(request.param)
        if register_hook and not record.has_hook:
            request.param.register_post_accumulate_grad_hook(_step)
            record.has_hook = True
    if stepper is not None:
        stepper.add_params(params)


def get_in_backward_optimizers(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step a module's parameters, for checkpoints and schedulers.

    Args:
        module: any module; a parameter that it has twice counts once.

    Returns:
        For each parameter in turn, its optimizers in the order in which they were applied.

    Example::

        >>> model = torch.nn.Linear(2, 1)
        >>> apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        >>> [type(optimizer).__name__ for optimizer in get_in_backward_optimizers(model)]
        ['SGD', 'SGD']
    """
    return [one for param in module.parameters() for one in _optimizers(param)]


def _optimizers(param: Tensor) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = getattr(param, IN_BACKWARD_OPTIMIZERS, [])
    return found


@disable_compile
def _step(param: Tensor) -> None:
    """Step a parameter whose gradient is accumulated."""
    if is_stepped_by_ddp(param):
        return
    for optimizer in _optimizers(param):
        optimizer.step()
    param.grad = None


def _attach(request: _Request, optimizer: torch.optim.Optimizer, optimizer_class: Any) -> None:
    """Store the optimizer in the attributes that torch uses."""
    for name, value in (
        (IN_BACKWARD_OPTIMIZERS, optimizer),
        (OPTIMIZER_CLASSES, optimizer_class),
        (OPTIMIZER_KWARGS, request.kwargs),
    ):
        known = getattr(request.param, name, None)
        if known is None:
            known = []
            setattr(request.param, name, known)
        known.append(value)


def _requests(params: Any, kwargs: Mapping[str, Any]) -> Iterator[_Request]:
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            "optimizer_kwargs must be a dict of arguments, such as {'lr': 0.1}, got "
            f"{format_value(kwargs)}"
        )
    if isinstance(params, (Tensor, Mapping, str)) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be an iterable of parameters, of (name, parameter) pairs or of dicts, got "
            f"{type(params).__name__}; put a single one into a list"
        )
    for index, one in enumerate(params):
        if isinstance(one, Mapping):
            if "params" not in one:
                raise ValueError(f"params[{index}] is a dict without 'params': {sorted(one)}")
            members = one["params"]
            members = [members] if isinstance(members, Tensor) else members
            group = {**kwargs, **{key: value for key, value in one.items() if key != "params"}}
            for at, member in enumerate(members):
                yield _request(f"params[{index}]['params'][{at}]", member, group)
        else:
            yield _request(f"params[{index}]", one, dict(kwargs))


def _request(name: str, value: Any, kwargs: dict[str, Any]) -> _Request:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        name, value = value
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a parameter (a tensor), got {type(value).__name__}")
    if not value.is_leaf:
        raise ValueError(
            f"{name} is no leaf: it was computed ({value.grad_fn}), so backward accumulates no "
            "gradient into it; give the parameter that it was computed from"
        )
    if not value.requires_grad:
        raise ValueError(
            f"{name} requires no gradient, so backward would never step it; leave frozen "
            "parameters out, or requires_grad_() it first"
        )
    return _Request(name, value, kwargs)


def _get_constructor(optimizer_class: Any) -> Make:
    """Return a function of ``(params, **kwargs)`` that builds an optimizer."""
    refuse_closure(optimizer_class, "an optimizer that steps in backward")
    if isinstance(optimizer_class, Optimizer):
        return lambda params, **kwargs: TorchOptimizer(params, optimizer_class.replace(**kwargs))
    inner = optimizer_class
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, type):
        if issubclass(inner, torch.optim.LBFGS):
            raise ValueError(
                f"{inner.__name__} evaluates the model several times in a step, through a closure; "
                "it cannot step in backward: call its step(closure)"
            )
        constructor: Make = optimizer_class
        return constructor
    if callable(optimizer_class):
        return partial(_call_functional, optimizer_class)
    raise TypeError(
        "optimizer_class must be a torch.optim class, a functional_optim.Optimizer or its "
        f"constructor, such as adamw, got {format_value(optimizer_class)}"
    )


def _call_functional(constructor: Callable[..., Any], params: Any, **kwargs: Any) -> Any:
    own = call_constructor(constructor, kwargs)
    return constructor(params, **kwargs) if own is None else TorchOptimizer(params, own)


def _build_optimizer(make: Make, request: _Request) -> torch.optim.Optimizer:
    try:
        optimizer = make([request.param], **request.kwargs)
    except Exception as error:
        error.add_note(f"(the optimizer of {request.name}, of shape {tuple(request.param.shape)})")
        raise
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "optimizer_class must make a torch.optim.Optimizer of [param], got "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, TorchOptimizer):
        chain = optimizer.chain
        measured = [stage.name for stage in chain.stages if is_measured(stage)]
        measured += [
            one.stage.name for one in chain.links if has_shared_state((one,), chain.overrides)
        ]
        if measured:
            raise ValueError(
                f"{measured[0]} needs the gradients of all parameters before any of them is "
                "stepped, and in backward each is stepped alone: leave it out of the chain, or "
                "step after backward with TorchOptimizer"
            )
        require_gradients_alone(chain, "an optimizer that steps in backward")
    return optimizer
