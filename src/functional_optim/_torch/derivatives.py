"""Detection of torch.func transforms and forward-mode tangents, and calls without autograd.

Tensors inside a torch.func transform have no memory, and their values must not be read. Without the
private names, ``torch.func.debug_unwrap`` is used.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FUNCTORCH = getattr(torch._C, "_functorch", None)


def _unwrap(tensor: Tensor) -> Tensor:
    found: Tensor = torch.func.debug_unwrap(tensor, recurse=False)
    return found


def _is_wrapped(tensor: Tensor) -> bool:
    return _unwrap(tensor) is not tensor


def _is_wrapped_by_grad(tensor: Tensor) -> bool:
    inner = _unwrap(tensor)
    return inner is not tensor and inner.dim() == tensor.dim()  # vmap hides a dimension


is_functorch_wrapped_tensor: Callable[[Tensor], bool] = (
    getattr(_FUNCTORCH, "is_functorch_wrapped_tensor", None) or _is_wrapped
)
is_gradtrackingtensor: Callable[[Tensor], bool] = (
    getattr(_FUNCTORCH, "is_gradtrackingtensor", None) or _is_wrapped_by_grad
)
get_unwrapped: Callable[[Tensor], Tensor] = getattr(_FUNCTORCH, "get_unwrapped", None) or _unwrap
_is_batchedtensor: Callable[[Tensor], bool] = getattr(_FUNCTORCH, "is_batchedtensor", None) or (
    lambda tensor: False
)
_maybe_get_level: Callable[[Tensor], int] = getattr(_FUNCTORCH, "maybe_get_level", None) or id


def vmap_levels(tensor: Tensor) -> frozenset[int]:
    """Return the levels of torch.func.vmap over which a tensor is batched.

    Without the private names, the set is empty, and torch raises its error when it writes.
    """
    found: set[int] = set()
    while is_functorch_wrapped_tensor(tensor):
        if _is_batchedtensor(tensor):
            found.add(_maybe_get_level(tensor))
        tensor = get_unwrapped(tensor)
    return frozenset(found)


def is_transforming() -> bool:
    """Return True inside a transform of torch.func, which may wrap the result of any operation.

    If torch does not give the level of the innermost transform, the result is True.
    """
    level = getattr(_FUNCTORCH, "maybe_current_level", None)
    return level is None or level() is not None


def is_forward_mode() -> bool:
    """Return True inside forward-mode differentiation, in which tensors may have tangents."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def tangent_of(tensor: Tensor) -> Tensor | None:
    """Return the forward-mode tangent of a tensor, or None."""
    if not is_forward_mode():  # fast, and true in most steps
        return None
    found: Tensor | None = forward_ad.unpack_dual(tensor).tangent
    return found


Given = ParamSpec("Given")
Result = TypeVar("Result")

_set_grad_enabled: Callable[[bool], object] | None = getattr(torch._C, "_set_grad_enabled", None)


def without_grad(
    call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Return ``call(*args, **kwargs)`` under ``torch.no_grad``.

    ``torch.no_grad()`` makes seven Python calls, which takes long in a small step.
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if _set_grad_enabled is None:
        with torch.no_grad():
            return call(*args, **kwargs)
    try:
        _set_grad_enabled(False)
        return call(*args, **kwargs)
    finally:
        _set_grad_enabled(True)
