"""Optimizers that step while backward runs: each parameter as soon as its gradient is there.

The gradient is freed at once, so that never more than one of them is alive in addition to what
backward itself needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, TorchOptimizer
from functional_optim._torch import IN_BACKWARD_OPTIMIZERS, OPTIMIZER_CLASSES, OPTIMIZER_KWARGS
from functional_optim.core.brief import brief
from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.compiling import uncompiled
from functional_optim.core.links import keeps_shared
from functional_optim.kernels import is_measured
from functional_optim.optimizer.constructors import made_without_params
from hooks.in_backward_ddp import (
    check_named,
    is_reduced_elsewhere,
    prepare,
    reduce_in_backward,
    stepping_of,
    watch_modules,
)

__all__ = ["apply_optimizer_in_backward", "get_in_backward_optimizers", "reduce_in_backward"]

Make = Callable[..., torch.optim.Optimizer]


class _Request(NamedTuple):
    """A parameter, and what its optimizer is made with."""

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
    """Have an optimizer of its own step each parameter during ``backward()``.

    When a parameter's gradient has been accumulated, all optimizers applied to it step, in the
    order in which they were applied, and its ``.grad`` becomes None. There is no ``step()`` to
    call. With ``g_t`` the gradient of one backward pass, each pass is one step,
    ``p_t = step(p_{t-1}, g_t)``, as that optimizer makes it on all parameters after backward.

    The optimizers are in ``param._in_backward_optimizers``, for learning-rate schedulers and
    checkpoints (see :func:`~hooks.in_backward.get_in_backward_optimizers`).

    **Every backward pass is a step.** Gradients cannot be accumulated over several passes, a loss
    scaled by a GradScaler would be stepped scaled, and a parameter that re-entrant checkpointing
    brings into several passes is stepped in each.

    **With DistributedDataParallel**, give the module as ``ddp``, or call
    :func:`~hooks.in_backward.reduce_in_backward` once it is made. Parameters are then stepped by
    the mean over all ranks, from DDP's communication hook, which must be free for it, and gradients
    are None at the end of backward. Here, gradients accumulate as usual under ``no_sync``, to be
    reduced and stepped by the next pass. Parameters that DDP is told to ignore are stepped on their
    own rank's gradient.

    Args:
        optimizer_class: a torch.optim class; or an :class:`~functional_optim.Optimizer`, such as
            ``adamw(lr=0.1)``, or its constructor, such as ``adamw``.
        params: parameters, or (name, parameter) pairs, or dicts with "params" and the arguments
            that differ for that group; also a generator. A parameter that comes twice gets two
            optimizers, as torch.optim steps it twice.
        optimizer_kwargs: the class's or constructor's arguments without ``params``; for an
            Optimizer, hyper-parameters to replace.
        register_hook: without it, optimizers are made and kept but nothing steps them, unless DDP
            does.
        ddp: the DistributedDataParallel module that reduces the gradients of these parameters;
            False where none does. It must be said where there is a process group, but for
            parameters of a module that was given before.

    Raises:
        TypeError: ``params`` holds something else; ``optimizer_class`` is none of these, or takes
            inputs beside the gradients; ``ddp`` is neither.
        ValueError: it is not said which DDP module reduces gradients; no parameter; one that
            requires no gradient or is no leaf; an optimizer that needs all gradients at once
            (clipping by global norm) or a closure (LBFGS).
        RuntimeError: DDP's communication hook is taken; (from backward) a gradient that DDP would
            have to reduce and will not, since the wrapped module was called without it, or this was
            called after its forward pass, or DDP was made later and never named.

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
    make = _maker(optimizer_class)
    made = [_made(make, request) for request in requests]
    check_named(ddp, {request.name: request.param for request in requests})
    params = [request.param for request in requests]
    stepper = prepare(ddp, params) if isinstance(ddp, DistributedDataParallel) else None
    watch_modules()
    for request, optimizer in zip(requests, made, strict=True):
        _attach(request, optimizer, optimizer_class)
        stepping = stepping_of(request.param)
        if register_hook and not stepping.hooked:
            request.param.register_post_accumulate_grad_hook(_step)
            stepping.hooked = True
    if stepper is not None:
        stepper.take_over(params)


def get_in_backward_optimizers(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that step a module's parameters in backward, for checkpoints and schedulers.

    Args:
        module: any module; a parameter that it holds twice counts once.

    Returns:
        Parameter by parameter, those applied to it in order.

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


@uncompiled
def _step(param: Tensor) -> None:
    """Step a parameter whose gradient has been accumulated."""
    if is_reduced_elsewhere(param):
        return
    for optimizer in _optimizers(param):
        optimizer.step()
    param.grad = None


def _attach(request: _Request, optimizer: torch.optim.Optimizer, optimizer_class: Any) -> None:
    """Keep the optimizer where torch's users look for it."""
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


# ------------------------------------------------------------------------- what the caller gave


def _requests(params: Any, kwargs: Mapping[str, Any]) -> Iterator[_Request]:
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            "optimizer_kwargs must be a dict of arguments, such as {'lr': 0.1}, got "
            f"{brief(kwargs)}"
        )
    if isinstance(params, (Tensor, Mapping, str)) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be an iterable of parameters, of (name, parameter) pairs or of dicts, got "
            f"{type(params).__name__}; put a single one into a list"
        )
    for place, one in enumerate(params):
        if isinstance(one, Mapping):
            if "params" not in one:
                raise ValueError(f"params[{place}] is a dict without 'params': {sorted(one)}")
            members = one["params"]
            members = [members] if isinstance(members, Tensor) else members
            group = {**kwargs, **{key: value for key, value in one.items() if key != "params"}}
            for at, member in enumerate(members):
                yield _request(f"params[{place}]['params'][{at}]", member, group)
        else:
            yield _request(f"params[{place}]", one, dict(kwargs))


def _request(name: str, given: Any, kwargs: dict[str, Any]) -> _Request:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        name, given = given
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a parameter (a tensor), got {type(given).__name__}")
    if not given.is_leaf:
        raise ValueError(
            f"{name} is no leaf: it was computed ({given.grad_fn}), so backward accumulates no "
            "gradient into it; give the parameter that it was computed from"
        )
    if not given.requires_grad:
        raise ValueError(
            f"{name} requires no gradient, so backward would never step it; leave frozen "
            "parameters out, or requires_grad_() it first"
        )
    return _Request(name, given, kwargs)


def _maker(optimizer_class: Any) -> Make:
    """A function of ``(params, **kwargs)``."""
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
        made_of_params: Make = optimizer_class
        return made_of_params
    if callable(optimizer_class):
        return partial(_made_by, optimizer_class)
    raise TypeError(
        "optimizer_class must be a torch.optim class, a functional_optim.Optimizer or its "
        f"constructor, such as adamw, got {brief(optimizer_class)}"
    )


def _made_by(constructor: Callable[..., Any], params: Any, **kwargs: Any) -> Any:
    own = made_without_params(constructor, kwargs)
    return constructor(params, **kwargs) if own is None else TorchOptimizer(params, own)


def _made(make: Make, request: _Request) -> torch.optim.Optimizer:
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
        measured += [one.stage.name for one in chain.links if keeps_shared((one,))]
        if measured:
            raise ValueError(
                f"{measured[0]} needs the gradients of all parameters before any of them is "
                "stepped, and in backward each is stepped alone: leave it out of the chain, or "
                "step after backward with TorchOptimizer"
            )
        require_gradients_alone(chain, "an optimizer that steps in backward")
    return optimizer
