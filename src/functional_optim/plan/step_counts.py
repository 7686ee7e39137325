"""Step counts of leaves."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor


def beside(steps: Sequence[Tensor]) -> list[Tensor]:
    """Copy step counts into one tensor, and return views of it."""
    return list(torch.stack(list(steps)).unbind()) if steps else []


def is_count(value: Any) -> TypeGuard[Tensor]:
    """Return True if a value is a 0-d int64 tensor on the CPU, as step counts in a state are."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 0
        and value.is_cpu
    )
