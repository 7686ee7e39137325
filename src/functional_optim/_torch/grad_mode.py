"""Calls without autograd."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

_set_grad_enabled: Callable[[bool], object] | None = getattr(torch._C, "_set_grad_enabled", None)


def without_grad(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return ``call(*args, **kwargs)``, under ``torch.no_grad``.

    The context of torch makes seven calls of Python functions, which is much for a small step.
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if _set_grad_enabled is None:
        with torch.no_grad():
            return call(*args, **kwargs)
    _set_grad_enabled(False)
    try:
        return call(*args, **kwargs)
    finally:
        _set_grad_enabled(True)
