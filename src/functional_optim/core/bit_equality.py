"""Comparison of tensors bit by bit."""

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have equal bits. Any NaN equals any other NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Integers are compared, because different denormals compare equal if torch flushes them. One
    # call of torch.equal is eight times as fast, and nearly always enough.
    words = _WORDS[a.itemsize]
    ours, theirs = a.view(words), b.view(words)
    if torch.equal(ours, theirs):
        return True
    return bool(((ours == theirs) | (a.isnan() & b.isnan())).all())
