"""Checks of a vector, a payload, or a choice, before anything is encoded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of which each number is one of float32."""


def finite_float32(flat: Any) -> Tensor:
    """The vector to be encoded, in float32; the tensor itself where it is that already.

    float64 is refused: it is not for an encoder to lose digits that nobody asked it to lose, and
    that no error bound would speak of.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not 1-D, of another dtype, or has an element that is not finite.
    """
    if not isinstance(flat, Tensor):
        raise TypeError(f"flat must be a tensor, got {type(flat).__name__}")
    if flat.dim() != 1:
        raise ValueError(
            f"flat must be 1-D, got shape {tuple(flat.shape)}: join tensors with "
            "torch.cat([tensor.flatten() ...])"
        )
    if flat.dtype not in TAKEN:
        raise ValueError(
            f"flat has dtype {flat.dtype}; it must be torch.float32, torch.bfloat16 or "
            "torch.float16: what is exchanged is float32, so give flat.float() if its digits will "
            "do"
        )
    wide = flat.detach().to(torch.float32)
    finite = wide.isfinite()
    if not bool(finite.all()):
        first = int(finite.logical_not().nonzero()[0])
        raise ValueError(
            f"element {first} of {wide.numel()} is {wide[first].item()}: only finite numbers can "
            "be compressed; leave this round out on all ranks, or mend what made it"
        )
    return wide


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """A whole number within bounds.

    Raises:
        ValueError: it is another thing, or out of bounds.
    """
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or value < least or (most is not None and value > most):
        allowed = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {allowed}, got {value!r}")
    return int(value)


def among(name: str, value: Any, allowed: Sequence[int], else_: str) -> None:
    """A whole number that is one of a few.

    Raises:
        ValueError: it is not; ``else_`` is the way out.
    """
    if type(value) is not int or value not in allowed:
        numbers = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must be {numbers}, got {value!r}; {else_}")


def check_payload(payload: Any, expected_bytes: int, numel: int, dtype: Any) -> None:
    """A payload as long as it must be, and a dtype that it can be decoded to.

    Raises:
        TypeError: the payload is no tensor.
        ValueError: it is of another dtype, shape or length, or dtype is not floating.
    """
    if not isinstance(payload, Tensor):
        raise TypeError(f"payload must be a tensor, got {type(payload).__name__}")
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (expected_bytes,):
        raise ValueError(
            f"payload has dtype {payload.dtype} and shape {tuple(payload.shape)}; for {numel} "
            f"elements it must be torch.uint8 of shape ({expected_bytes},): sender and receiver "
            "need the same compression and the same number of elements"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating torch.dtype, got {dtype!r}")
