"""Checks of a vector, a payload or an option, before encoding or decoding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ENCODABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose numbers are all float32 numbers."""


def finite_float32(flat: Any) -> Tensor:
    """Check a vector to encode, and return it in float32, without a copy if it is float32.

    float64 is an error, because an encoder must not drop digits that no error bound accounts for.

    Raises:
        TypeError: the vector is not a tensor.
        ValueError: it is not 1-D, has another dtype, or has an element that is not finite.
    """
    if not isinstance(flat, Tensor):
        raise TypeError(f"flat must be a tensor, got {type(flat).__name__}")
    if flat.dim() != 1:
        raise ValueError(
            f"flat must be 1-D, got shape {tuple(flat.shape)}: join tensors with "
            "torch.cat([tensor.flatten() ...])"
        )
    if flat.dtype not in ENCODABLE_DTYPES:
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


def check_int(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return an integer; raise ValueError if it is no integer, or out of bounds."""
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or value < least or (most is not None and value > most):
        allowed = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {allowed}, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, allowed: Sequence[int], else_: str) -> None:
    """Raise ValueError, with the advice ``else_``, if an integer is not allowed."""
    if type(value) is not int or value not in allowed:
        numbers = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must be {numbers}, got {value!r}; {else_}")


def check_payload(payload: Any, expected_bytes: int, numel: int, dtype: Any) -> None:
    """Raise an error if a payload has another form or length, or a dtype is not floating."""
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
