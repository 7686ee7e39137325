"""Detection of tensors that share memory, and copies that do not."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import get_unwrapped, is_functorch_wrapped_tensor
from functional_optim._torch.tensors import storage_id
from functional_optim.core.dtensors import is_dtensor, to_local


def storage_key(tensor: Tensor) -> int:
    """Return a key that two living tensors share if and only if they share storage."""
    inner = to_local(tensor.detach()) if is_dtensor(tensor) else tensor
    while is_functorch_wrapped_tensor(inner):
        inner = get_unwrapped(inner)
    try:
        return storage_id(inner.untyped_storage())
    except (NotImplementedError, RuntimeError):  # the tensor has no storage
        return id(inner)


def clone_aliased(gradients: Sequence[Any], written: Iterable[Tensor]) -> Sequence[Any]:
    """Return the gradients, with clones of those that share storage with written tensors.

    A step in place writes parameters one by one. Without the clone, a gradient that shares storage
    with another parameter or state would change before the step reads it.
    """
    storages = storage_addresses(written)
    dense = [one for one in gradients if one is not None and one.layout == torch.strided]
    if storages.isdisjoint(storage_addresses(dense)):
        return gradients
    aliased = {id(one) for one in dense if not storages.isdisjoint(storage_addresses([one]))}
    return [one.clone() if id(one) in aliased else one for one in gradients]


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of storages, or a :func:`storage_key` of each tensor if one has none."""
    every = list(tensors)
    try:  # map runs no Python code for each tensor
        found = set(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, every)))
    except (NotImplementedError, RuntimeError):
        return set(map(storage_key, every))
    return found - {0}


class AliasTracker:
    """Record of the arguments and results of a function, to copy results that share memory.

    While a compiler traces, storages are unknown. Then a result is copied only if it *is* an
    argument or an earlier result; a view of one is not copied.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._is_traced = torch.compiler.is_compiling()
        dense = [one for one in tensors if one.layout == torch.strided]
        self._tensors = set(dense) if self._is_traced else set()
        self._storages = set() if self._is_traced else set(map(storage_key, dense))
        self._result_starts: set[tuple[int, Any]] = set()

    def copy_if_aliased(self, result: Tensor) -> Tensor:
        """Return the result, or a copy with the same strides if it shares memory, and record it."""
        if self._is_traced:
            if result in self._tensors:
                result = clone_strided(result)
            self._tensors.add(result)
            return result
        storage = storage_key(result)
        # Results may be disjoint parts of one storage: they are told apart by their offsets.
        if storage in self._storages or (storage, result.storage_offset()) in self._result_starts:
            result = clone_strided(result)
            storage = storage_key(result)
        self._result_starts.add((storage, result.storage_offset()))
        return result


def clone_strided(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, or a contiguous copy if elements share memory."""
    return match_strides(tensor.clone(), tensor)


def match_strides(values: Tensor, like: Tensor) -> Tensor:
    """Return the values with the strides of ``like``, which has the same shape.

    Rounding in torch's kernels depends on strides, so a state must keep its strides. If elements of
    ``like`` share memory, the values keep their own strides. TorchScript compiles this function,
    since rules call it.
    """
    if values.stride() == like.stride() or has_internal_overlap(like):
        return values
    return values.new_empty_strided(like.size(), like.stride()).copy_(values)


def has_internal_overlap(tensor: Tensor) -> bool:
    """Return True if two elements may share memory, as in an expanded or unfolded view."""
    extent = 0
    strides = tensor.stride()
    for stride, size in sorted([(strides[k], size) for k, size in enumerate(tensor.shape)]):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False
