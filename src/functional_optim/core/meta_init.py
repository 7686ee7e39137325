"""Fast ``zeros_like`` and similar functions on the meta device.

torch computes ``zeros_like`` of a meta tensor in Python, and imports sympy for it. This takes a
third of a second in every process.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LIKE = frozenset({torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like})


class MetaLikeMode(TorchFunctionMode):
    """Mode in which ``*_like`` of a contiguous meta tensor is a meta ``torch.empty``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or return an empty meta tensor of the same shape."""
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
