"""Tensors that stand for a number: whether it is known, and may be taken."""

import torch
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor


def concrete(value: Tensor) -> float | None:
    """The number in a 0-d tensor; None where torch.func or a compiler hides it."""
    if torch.compiler.is_compiling():
        return None
    try:
        return float(value.item())
    except RuntimeError:
        return None


def carries_derivative(value: Tensor) -> bool:
    """Return True if autograd or torch.func follows a tensor, so that its number must not be taken.

    So it is, for all that is known, where torch.compile or torch.export traces a step: one program
    is to serve every number.
    """
    if torch.compiler.is_compiling():
        return True
    if value.requires_grad or is_functorch_wrapped_tensor(value):
        return True
    return torch.autograd.forward_ad.unpack_dual(value).tangent is not None
