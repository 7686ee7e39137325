"""Private properties and functions of tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.missing_name import MissingName

_COUNTER = count()


def _new_version(tensor: Any) -> int:
    return next(_COUNTER)


has_versions: bool = getattr(Tensor, "_version", None) is not None
"""True if torch counts the writes to a tensor."""

version_of: Callable[[Any], int] = attrgetter("_version") if has_versions else _new_version
"""Return a number that changes with each write to a tensor that autograd knows.

Without the private attribute, each call returns a new number, so that values are read again."""

_IS_VIEW: Any = getattr(Tensor, "_is_view", None)

_NO_VIEWS: Any = MissingName(
    "torch.Tensor._is_view",
    "a parameter that is a view of another tensor cannot be told from one that is none",
    "step parameters where they are, by update_",
)
is_view: Callable[[Tensor], bool] = _IS_VIEW or _NO_VIEWS
"""Return True if a tensor is a view for autograd."""


def _return_true(tensor: Tensor) -> bool:
    return True


may_be_view: Callable[[Tensor], bool] = _IS_VIEW or _return_true
"""Return False only if a tensor is not a view. Without the private method, always True."""

storage_id: Callable[[torch.UntypedStorage], int] = (
    id if getattr(torch.UntypedStorage, "_cdata", None) is None else attrgetter("_cdata")
)
"""Return a number that is unique among living storages; addresses may be 0, as on meta.

Without the private attribute: the id of the Python object, which is one for each storage."""

_UNCOALESCED = MissingName(
    "torch.Tensor._values or _indices",
    "the parts of a sparse tensor that is not coalesced cannot be had",
    "coalesce() sparse gradients first",
)


def _coalesced_values(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_coalesced() else _UNCOALESCED()


def _coalesced_indices(tensor: Tensor) -> Tensor:
    return tensor.indices() if tensor.is_coalesced() else _UNCOALESCED()


values_of: Callable[[Tensor], Tensor] = getattr(Tensor, "_values", None) or _coalesced_values
"""Return the values of a sparse tensor, which need not be coalesced as for ``values()``."""
indices_of: Callable[[Tensor], Tensor] = getattr(Tensor, "_indices", None) or _coalesced_indices

DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "DisableTorchFunction", nullcontext
)
"""Context without ``__torch_function__`` of modes and tensor classes, which runs Python code in
every call, such as for ``torch.set_default_device``. Without it, results are the same."""

_NO_WRAPPERS: Any = MissingName(
    "torch.Tensor._make_wrapper_subclass",
    "a tensor of which each rank has a part cannot be made",
    "call consolidate_state_dict() before state_dict()",
)
wrapper_tensor: Callable[..., Any] = getattr(Tensor, "_make_wrapper_subclass", None) or _NO_WRAPPERS
"""``wrapper_tensor(cls, shape, dtype=, device=)``: build a tensor of a subclass without memory."""

to_copy: Any = getattr(torch.ops.aten, "_to_copy", torch.ops.aten.clone).default
"""The operator of ``Tensor.to``, or another operator that copies."""
