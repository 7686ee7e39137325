"""Memory that two tensors share, and copies where a result shares some with what was given."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import get_unwrapped, is_functorch_wrapped_tensor, memory_of
from functional_optim.core.dtensors import is_sharded, local

Storage = int
"""What the tensors of one memory have in common."""


def storage_of(tensor: Tensor) -> Storage:
    """Return a number that tensors share if and only if they share memory, while one lives."""
    seen = local(tensor.detach()) if is_sharded(tensor) else tensor  # what has the memory
    while is_functorch_wrapped_tensor(seen):
        seen = get_unwrapped(seen)
    try:
        return memory_of(seen.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own kind
        return id(seen)


def apart_from(gradients: Sequence[Any], written: Iterable[Tensor]) -> Sequence[Any]:
    """Return the gradients, with copies of those stored where a step in place writes.

    A step writes one parameter after the other. A gradient that is another parameter (or a state)
    has to be read before that.

    Args:
        gradients: of the parameters; None, or a sparse one, stays as it is.
        written: the parameters and states of all of them.
    """
    storages = storages_of(written)
    there = [one for one in gradients if one is not None and one.layout == torch.strided]
    if storages.isdisjoint(storages_of(there)):
        return gradients
    return [
        one.clone()
        if one is not None
        and one.layout == torch.strided
        and not storages_of([one]).isdisjoint(storages)
        else one
        for one in gradients
    ]


def storages_of(tensors: Iterable[Tensor]) -> set[Storage]:
    """Return the addresses of the storages; of tensors without an address, :func:`storage_of`."""
    every = list(tensors)
    try:  # no Python runs per tensor
        found = set(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, every)))
    except (NotImplementedError, RuntimeError):
        return set(map(storage_of, every))
    return found - {0}


class GivenMemory:
    """Tensors that no result may share memory with, results before it among them.

    While a compiler traces, memory cannot be seen: only a result that *is* such a tensor is copied
    then, and a view of one remains a view.

    Args:
        tensors: the arguments.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._traced = torch.compiler.is_compiling()
        given = [one for one in tensors if one.layout == torch.strided]
        self._tensors = set(given) if self._traced else set()
        self._storages = set() if self._traced else set(map(storage_of, given))
        self._places: set[tuple[Storage, Any]] = set()

    def apart(self, result: Tensor) -> Tensor:
        """The result, or a copy of it in its layout; the next one shares no memory with that."""
        if self._traced:
            made = copy_of(result) if result in self._tensors else result
            self._tensors.add(made)
            return made
        storage = storage_of(result)
        # Of results, disjoint parts of one buffer are as good as memory of their own.
        if storage in self._storages or (storage, result.storage_offset()) in self._places:
            result = copy_of(result)
            storage = storage_of(result)
        self._places.add((storage, result.storage_offset()))
        return result


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, where elements have memory of their own."""
    return laid_as(tensor.clone(), tensor)


def laid_as(values: Tensor, like: Tensor) -> Tensor:
    """Return the values with the strides of another tensor of the shape.

    torch's kernels round by layout, so who loses the strides of a slice rounds otherwise at the
    next step. Values stay as they lie where elements of ``like`` share memory, in which they could
    not be told apart. TorchScript takes it, since rules call it.
    """
    if values.stride() == like.stride() or overlaps_itself(like):
        return values
    return values.new_empty_strided(like.size(), like.stride()).copy_(values)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return True if two elements may share memory, as in an expanded or unfolded view."""
    extent = 0
    strides = tensor.stride()
    for stride, size in sorted([(strides[k], size) for k, size in enumerate(tensor.shape)]):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False
