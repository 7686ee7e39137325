"""Tensors inside a transform of torch.func, and tangents of forward-mode differentiation.

What torch.func traces has no memory to look into, and its number must not be taken. Without these
names: what torch.func.debug_unwrap tells, some of it in more calls.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FUNCTORCH = getattr(torch._C, "_functorch", None)


def _unwrapped_once(tensor: Tensor) -> Tensor:
    found: Tensor = torch.func.debug_unwrap(tensor, recurse=False)
    return found


def _is_wrapped(tensor: Tensor) -> bool:
    return _unwrapped_once(tensor) is not tensor


def _is_wrapped_by_grad(tensor: Tensor) -> bool:
    within = _unwrapped_once(tensor)
    return within is not tensor and within.dim() == tensor.dim()  # vmap takes a dimension away


is_functorch_wrapped_tensor: Callable[[Tensor], bool] = (
    getattr(_FUNCTORCH, "is_functorch_wrapped_tensor", None) or _is_wrapped
)
is_gradtrackingtensor: Callable[[Tensor], bool] = (
    getattr(_FUNCTORCH, "is_gradtrackingtensor", None) or _is_wrapped_by_grad
)
get_unwrapped: Callable[[Tensor], Tensor] = (
    getattr(_FUNCTORCH, "get_unwrapped", None) or _unwrapped_once
)


_is_batchedtensor: Callable[[Tensor], bool] = getattr(_FUNCTORCH, "is_batchedtensor", None) or (
    lambda tensor: False
)
_maybe_get_level: Callable[[Tensor], int] = getattr(_FUNCTORCH, "maybe_get_level", None) or id


def vmap_levels(tensor: Tensor) -> frozenset[int]:
    """The transforms by torch.func.vmap that have many values in the place of a tensor's one.

    Without the names that tell them, none: torch refuses then what it cannot write.
    """
    found: set[int] = set()
    while is_functorch_wrapped_tensor(tensor):
        if _is_batchedtensor(tensor):
            found.add(_maybe_get_level(tensor))
        tensor = get_unwrapped(tensor)
    return frozenset(found)


def is_transforming() -> bool:
    """Return True inside a transform of torch.func, which may wrap what any operation returns.

    torch tells the level of the innermost. Without that number, there may be one.
    """
    level = getattr(_FUNCTORCH, "maybe_current_level", None)
    return level is None or level() is not None


def is_forward_mode() -> bool:
    """Return True if forward-mode differentiation goes on, in which a tensor may have a tangent."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def tangent_of(tensor: Tensor) -> Tensor | None:
    """The tangent that forward-mode differentiation gave a tensor.

    Most steps are outside of it, which the number of the level tells at once. Without that number,
    the tensor is asked.
    """
    if not is_forward_mode():
        return None
    found: Tensor | None = forward_ad.unpack_dual(tensor).tangent
    return found
