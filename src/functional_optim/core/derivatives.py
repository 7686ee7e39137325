"""Derivatives of a step that some stages do not have: they are refused, and not taken for zero."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import (
    get_unwrapped,
    is_forward_mode,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    tangent_of,
)
from functional_optim.core.hyper import mapped
from functional_optim.core.stage import Stage


def refuse_derivative(
    what: str, params: Iterable[Tensor], others: Iterable[Tensor], hypers: Iterable[Any]
) -> None:
    """Make sure that no derivative of a step is asked for.

    Parameters that autograd would follow are no reason: those of a module are such.

    Args:
        what: has no derivative, for the error.
        params: of the step, and what else may require grad.
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
    """Return True if torch.func or forward-mode differentiation follows a tensor.

    A tensor of several levels shows a tangent of the innermost alone. So in forward mode it counts
    as followed.
    """
    levels = 0
    while is_functorch_wrapped_tensor(tensor):
        if is_gradtrackingtensor(tensor):
            levels += 1
            if torch.is_grad_enabled() and tensor.requires_grad:
                return True
            if is_forward_mode() and (levels > 1 or tangent_of(tensor) is not None):
                return True
        tensor = get_unwrapped(tensor)
    return tangent_of(tensor) is not None


def require_differentiable(
    stages: Sequence[Stage],
    name: str,
    param: Tensor,
    given: Iterable[Tensor],
    hypers: Iterable[Any],
    extra: Iterable[Any],
) -> None:
    """Make sure that no derivative is asked for of a leaf, if one of its stages has none.

    Args:
        stages: of the leaf.
        name: of the leaf.
        param: the parameter.
        given: its gradient, its state, and totals.
        hypers: its hyper-parameters.
        extra: inputs besides the gradients, such as the loss, which may require grad.

    Raises:
        RuntimeError: as for :func:`refuse_derivative`.
    """
    first = next((stage for stage in stages if not stage.differentiable), None)
    if first is not None:
        inputs = [one for one in extra if isinstance(one, Tensor)]
        refuse_derivative(f"the step at {name!r}: {first.name}", [param, *inputs], given, hypers)
