"""Comparison of tensors and state dicts bit for bit."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def bits(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor, in the order of its shape."""
    whole = tensor.detach().contiguous()
    real = torch.view_as_real(whole) if whole.is_complex() else whole
    return real.reshape(-1).view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if dtype, shape and every bit are equal; strides may differ."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(bits(one), bits(other))


def differing(params: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ."""
    return [name for name, param in params.items() if not same(param, wanted[name])]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the values, to compare ranks."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bytes(bits(tensor).tolist()))
    return found.hexdigest()


def difference(one: Any, other: Any, at: str = "") -> list[str]:
    """Return the places where two trees differ, ignoring the option ``foreach``."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if same(one, other) else [f"{at}: {one.dtype} {other.dtype} values"]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if key != "foreach"]
        odd = [f"{at}.{key} only once" for key in keys if (key in one) != (key in other)]
        both = [key for key in keys if key in one and key in other]
        return odd + [text for k in both for text in difference(one[k], other[k], f"{at}.{k}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in difference(*pair, f"{at}[{i}]")]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]
