"""Derivatives of a step that some stages do not have: they are refused, and not taken for zero."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    tangent_of,
)
from functional_optim.core.hyper import mapped
from functional_optim.core.stage import Stage
from functional_optim.core.state import state_tensors


def refuse_derivative(
    what: str, params: Iterable[Tensor], others: Iterable[Tensor], hypers: Iterable[Any]
) -> None:
    """Make sure that no derivative of a step is asked for.

    Parameters that autograd would follow are no reason: those of a module are such.

    Args:
        what: has no derivative, for the error.
        params: of the step.
        others: gradients and state.
        hypers: hyper-parameters, in tuples.

    Raises:
        RuntimeError: torch.func or forward-mode differentiation follows one of the tensors, or
            autograd one that is no parameter.
    """
    if torch.compiler.is_compiling():
        return
    numbers: list[Tensor] = []
    mapped(Tensor, numbers.append, tuple(hypers))
    if any(map(_by_transform, [*params, *others, *numbers])) or (
        torch.is_grad_enabled() and any(one.requires_grad for one in [*others, *numbers])
    ):
        raise RuntimeError(
            f"{what} has no derivative, and one is asked for: an argument is followed by "
            "torch.func, or requires grad. Call update under torch.no_grad(), detach() the "
            "arguments, or take the derivative of another optimizer"
        )


def _by_transform(tensor: Tensor) -> bool:
    """Return True if torch.func or forward-mode differentiation follows a tensor."""
    if tangent_of(tensor) is not None:
        return True
    while torch.is_grad_enabled() and is_functorch_wrapped_tensor(tensor):
        if is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return False


def require_differentiable(
    stages: Sequence[Stage], name: str, param: Tensor, grad: Tensor, states: Any, hypers: Any
) -> None:
    """Make sure that no derivative is asked for of a leaf, if one of its stages has none.

    Raises:
        RuntimeError: as for :func:`refuse_derivative`.
    """
    for stage in stages:
        if not stage.differentiable:
            what = f"the step at {name!r}: {stage.name}"
            refuse_derivative(what, [param], [grad, *state_tensors(states)], hypers)
