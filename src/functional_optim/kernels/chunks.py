"""Chunks: leaves whose tensors are 1-D views of dense memory, which kernels step in place."""

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor, tangent_of
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import map_state

POINTER = ctypes.c_void_p

_BYTES = attrgetter("nbytes")

LARGE = 1 << 16
"""Number of elements from which a leaf is stepped alone if no compiled loop takes pointers: the
cost of a call is then small. Smaller leaves are stepped in lists."""


ALIGNMENT = 16
"""Largest number of bytes that a thread of a CUDA device reads at once."""


class Table(NamedTuple):
    """Arguments of a compiled loop: the lengths of leaves, and the addresses of their tensors."""

    elements: int
    """Total number of elements of the leaves."""
    leaves: int
    """Number of leaves."""
    lengths: Any
    """Number of elements of each leaf."""
    addresses: Any
    """The addresses of all tensors, leaf by leaf, the parameter first."""

    @classmethod
    def of(cls, lengths: Sequence[int], addresses: Sequence[int]) -> "Table":
        """Return the table of leaves with these lengths and addresses."""
        return cls(
            sum(lengths),
            len(lengths),
            (ctypes.c_long * len(lengths))(*lengths),
            (POINTER * len(addresses))(*addresses),
        )

    @classmethod
    def from_tensors(cls, leaves: Sequence[Sequence[Tensor]]) -> "Table":
        """Return the table of leaves, each given as its tensors, the parameter first."""
        lengths = [tensors[0].numel() for tensors in leaves]
        return cls.of(lengths, [one.data_ptr() for tensors in leaves for one in tensors])


def is_large(tensor: Tensor) -> bool:
    """Return True for a tensor of :data:`LARGE` elements or more."""
    return tensor.numel() >= LARGE


def tensors_of(leaf: Leaf) -> list[Tensor]:
    """Return the parameter, the gradient, and the tensors of all states, in order."""
    found = [leaf.param, leaf.grad]
    for state in leaf.states:
        for value in state:
            if isinstance(value, list):
                found += value
            else:
                found.append(value)
    return found


def with_tensors(leaf: Leaf, tensors: Sequence[Tensor]) -> Leaf:
    """Return the leaf with other tensors, in the order of :func:`tensors_of`."""
    left = iter(tensors)
    param, grad = next(left), next(left)
    states = tuple(map_state(lambda _: next(left), state) for state in leaf.states)
    return leaf._replace(param=param, grad=grad, states=states)


def slice_chunk(tensors: Sequence[Tensor], block_size: int, start: int, stop: int) -> list[Tensor]:
    """Return elements ``[start, stop)`` of each tensor of a chunk.

    Each tensor has as many elements as the parameter, or one for each block. Both ends are
    multiples of ``block_size``; ``stop`` may also be the end of the chunk.
    """
    count = tensors[0].numel()
    return [
        tensor[start:stop]
        if tensor.numel() == count
        else tensor[start // block_size : -(-stop // block_size)]
        for tensor in tensors
    ]


UNCHUNKABLE: dict[tuple[Stage, ...], str] = {}
"""Pointwise chains whose leaves are not stepped as chunks, and the reason (see ``rounding``)."""


def why_not_pointwise(stages: Sequence[Stage]) -> str | None:
    """Return the reason why a chain cannot be stepped in chunks; None if it can."""
    whole = [stage.name for stage in stages if stage.kind != "pointwise"]
    if whole:
        return f"{whole[0]} needs its whole tensor"
    return UNCHUNKABLE.get(tuple(stages)) if UNCHUNKABLE else None


def why_not_flat(stages: Sequence[Stage], leaf: Leaf) -> str | None:
    """Return the reason why a leaf cannot be a chunk or part of one; None if it can."""
    count, has_no_dims = leaf.param.numel(), not leaf.param.dim()
    allowed = count, -(-count // block_size_of(stages))
    for tensor in tensors_of(leaf):
        if tensor.numel() not in allowed or (not tensor.dim()) != has_no_dims:
            return f"{leaf.name!r} keeps a state of another shape than the parameter"
    return None


def flat_view(tensor: Tensor, like: Tensor) -> Tensor | None:
    """Return a dense tensor as a 1-D view, in the memory order of ``like``; None if it has none."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.detach().view(-1)
    if _strides(tensor) != _strides(like) or not is_dense(tensor):
        return None
    return flatten_dense(tensor)


def flatten_dense(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a 1-D view, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element."""
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def are_disjoint(tensors: Sequence[Tensor]) -> bool:
    """Return True if no two of these contiguous tensors share memory."""
    reach = 0
    for start, size in sorted([(one.data_ptr(), one.nbytes) for one in tensors]):
        if size and start < reach:
            return False
        reach = max(reach, start + size)
    return True


def is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor has no gaps in memory, and no two elements share an address."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def extent_of(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (1 + sum(steps)) * tensor.element_size()


def flat_views(leaf: Leaf) -> list[Tensor] | None:
    """Return 1-D views of the tensors of a leaf, all in one order; None if there are none."""
    views = []
    blocks = any(tensor.shape != leaf.param.shape for tensor in tensors_of(leaf))
    if blocks and not leaf.param.is_contiguous():
        return None  # blocks are consecutive in the order of the shape, not of memory
    for tensor in tensors_of(leaf):
        view = flat_view(tensor, leaf.param if tensor.shape == leaf.param.shape else tensor)
        if view is None:
            return None
        views.append(view)
    return views


def as_chunk(leaf: Leaf) -> Leaf | None:
    """Return a leaf of 1-D views that share no memory; None if there is none."""
    views = flat_views(leaf)
    return None if views is None or not are_disjoint(views) else with_tensors(leaf, views)


def is_differentiated(leaf: Leaf) -> bool:
    """Return True if a derivative of the step may be needed. Kernels compute none."""
    numbers = isinstance(leaf.step, Tensor) or any(map(has_tensor, leaf.coefficients))
    return numbers or any(map(is_differentiated_tensor, tensors_of(leaf)))


def has_tensor(value: Any) -> bool:
    """Return True for a tensor, and for a tuple or list that contains one."""
    if isinstance(value, (tuple, list)):
        return any(map(has_tensor, value))
    return isinstance(value, Tensor)


def is_differentiated_tensor(tensor: Tensor) -> bool:
    """Return True if a derivative with respect to a tensor may be needed."""
    if is_functorch_wrapped_tensor(tensor):
        return True
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return tangent_of(tensor) is not None
