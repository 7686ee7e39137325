"""Properties of a tensor, and of many tensors without Python for each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.missing import Missing

_NUMBERS = count()


def _another_number(tensor: Any) -> int:
    return next(_NUMBERS)


has_versions: bool = getattr(Tensor, "_version", None) is not None
"""Whether torch tells how often a tensor was written to."""

version_of: Callable[[Any], int] = attrgetter("_version") if has_versions else _another_number
"""A number that is another one whenever autograd has seen that someone wrote to a tensor.

Without it: another one each time, so that what was read of a tensor is read again."""

_IS_VIEW: Any = getattr(Tensor, "_is_view", None)

_NO_VIEWS: Any = Missing(
    "torch.Tensor._is_view",
    "a parameter that is a view of another tensor cannot be told from one that is none",
    "keep parameters where they are (flat=False), and step them by update_",
)
is_view: Callable[[Tensor], bool] = _IS_VIEW or _NO_VIEWS
"""Whether a tensor is a view for autograd."""


def _perhaps(tensor: Tensor) -> bool:
    return True


may_be_view: Callable[[Tensor], bool] = _IS_VIEW or _perhaps
"""The same, for a quick look before a thorough one. Without it: any tensor may be a view."""

memory_of: Callable[[torch.UntypedStorage], int] = (
    id if getattr(torch.UntypedStorage, "_cdata", None) is None else attrgetter("_cdata")
)
"""A number of a storage that no other one has while it lives; an address may be 0, as on meta.

Without it: that of the object in Python, of which torch makes one for each storage."""

_UNCOALESCED = Missing(
    "torch.Tensor._values or _indices",
    "the parts of a sparse tensor that is not coalesced cannot be had",
    "coalesce() sparse gradients first",
)


def _coalesced_values(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_coalesced() else _UNCOALESCED()


def _coalesced_indices(tensor: Tensor) -> Tensor:
    return tensor.indices() if tensor.is_coalesced() else _UNCOALESCED()


values_of: Callable[[Tensor], Tensor] = getattr(Tensor, "_values", None) or _coalesced_values
"""The values of a sparse tensor; ``values()`` wants it coalesced."""
indices_of: Callable[[Tensor], Tensor] = getattr(Tensor, "_indices", None) or _coalesced_indices

DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "DisableTorchFunction", nullcontext
)
"""Keeps modes such as that of ``torch.set_default_device``, and classes of tensors, from running
Python at every call. Without it: they run it, and the results are the same."""

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None  # type: ignore[assignment, misc]

TensorGuards: Any = _TensorGuards
"""What torch.compile guards its inputs with: shapes, strides, dtypes of many tensors in one call.
Without it: None, and three times the time in Python."""

_NO_WRAPPERS: Any = Missing(
    "torch.Tensor._make_wrapper_subclass",
    "a tensor of which each rank has a part cannot be made",
    "call consolidate_state_dict() before state_dict()",
)
wrapper_tensor: Callable[..., Any] = getattr(Tensor, "_make_wrapper_subclass", None) or _NO_WRAPPERS
"""``wrapper_tensor(cls, shape, dtype=, device=)``: a tensor of a class that keeps its elements."""

to_copy: Any = getattr(torch.ops.aten, "_to_copy", torch.ops.aten.clone).default
"""The operator by which ``Tensor.to`` moves a tensor. Without it: another that copies."""
