"""Errors for derivatives of steps that are not differentiable, which would otherwise be zero."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import (
    get_unwrapped,
    is_forward_mode,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    tangent_of,
)
from functional_optim.core.hyper import map_values
from functional_optim.core.stage import Stage


def refuse_derivative(
    what: str, params: Iterable[Tensor], others: Iterable[Tensor], hypers: Iterable[Any]
) -> None:
    """Raise RuntimeError if a derivative of a step is requested.

    This is the case if torch.func or forward-mode differentiation tracks one of the tensors, or if
    autograd tracks a tensor of ``others`` or ``hypers``. Parameters may require grad.
    """
    if torch.compiler.is_compiling():
        return
    numbers: list[Tensor] = []
    map_values(Tensor, numbers.append, tuple(hypers))
    if any(map(_is_transformed, [*params, *others, *numbers])) or (
        torch.is_grad_enabled() and any(one.requires_grad for one in [*others, *numbers])
    ):
        raise RuntimeError(
            f"{what} has no derivative, and one is asked for: an argument is followed by "
            "torch.func, or requires grad. Call update under torch.no_grad(), detach() the "
            "arguments, or take the derivative of another optimizer"
        )


def _is_transformed(tensor: Tensor) -> bool:
    """Return True if torch.func or forward-mode differentiation tracks a tensor.

    A tensor of several levels only shows the tangent of the innermost level. So it counts as
    tracked in forward mode.
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
    """Raise RuntimeError if a derivative is requested of a leaf with a stage that has none."""
    first = next((stage for stage in stages if not stage.differentiable), None)
    if first is not None:
        inputs = [one for one in extra if isinstance(one, Tensor)]
        refuse_derivative(f"the step at {name!r}: {first.name}", [param, *inputs], given, hypers)
