"""Tensors without memory that are made like others, without torch's symbolic algebra.

On the meta device torch answers ``zeros_like`` in Python, and imports a computer algebra system for
it: a third of a second in every process, for one question about shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LIKE = frozenset({torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like})


class WithoutMemory(TorchFunctionMode):
    """While it is on, what is made like a contiguous meta tensor has its shape and dtype alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make it, or let torch do so."""
        given = dict(kwargs or {})
        like = args[0] if args else given.get("input")
        if (
            func in _LIKE
            and type(like) is Tensor
            and like.is_meta
            and like.is_contiguous()
            and given.keys() <= {"dtype", "input", "fill_value"}
        ):
            dtype = given.get("dtype") or like.dtype
            return torch.empty(like.shape, dtype=dtype, device="meta")
        return func(*args, **given)
