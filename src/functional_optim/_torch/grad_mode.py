"""Calls without autograd.

Without its name, which torch's own context calls: that context.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")

_set_grad_enabled: Callable[[bool], object] | None = getattr(torch._C, "_set_grad_enabled", None)


def without_grad(
    call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Return ``call(*args, **kwargs)``, under ``torch.no_grad``.

    The context of torch makes seven calls of Python functions, which is much for a small step.
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
