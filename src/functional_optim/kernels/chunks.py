"""Leaves as chunks: elements in one piece of memory, which kernels work through.

A leaf that fills its memory is a chunk as it stands.
"""

import ctypes
from collections.abc import Sequence
from itertools import islice
from operator import le
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import map_state

POINTER = ctypes.c_void_p

LARGE = 1 << 16
"""Elements from which a leaf is stepped alone where no loop takes pointers: the call is then cheap
beside the work. Smaller leaves are stepped in lists."""


ALIGNMENT = 16
"""Bytes that a thread of a CUDA device reads at once, at most."""


class Table(NamedTuple):
    """Leaves as a loop takes them: pointers to where their tensors begin."""

    elements: int
    """Of all of them."""
    leaves: int
    lengths: Any
    """The elements of each."""
    addresses: Any
    """Of each leaf, where its tensors begin, the parameter first."""
    gradients: Any = None
    """Where the gradient of each begins (pointers, or the bytes of such), if it is not where
    ``addresses`` say."""

    @classmethod
    def of(cls, lengths: Sequence[int], addresses: Sequence[int]) -> "Table":
        """The table of some leaves."""
        return cls(
            sum(lengths),
            len(lengths),
            (ctypes.c_long * len(lengths))(*lengths),
            (POINTER * len(addresses))(*addresses),
        )

    def by(self, gradients: Sequence[int] | bytes) -> "Table":
        """Return the table with gradients at other addresses."""
        where: Any = gradients
        if not isinstance(gradients, bytes):
            where = (POINTER * len(gradients))(*gradients)
        return Table(self.elements, self.leaves, self.lengths, self.addresses, where)

    @classmethod
    def of_tensors(cls, leaves: Sequence[Sequence[Tensor]]) -> "Table":
        """The table of leaves, of which each is its tensors, the parameter first."""
        lengths = [tensors[0].numel() for tensors in leaves]
        return cls.of(lengths, [one.data_ptr() for tensors in leaves for one in tensors])


def is_large(tensor: Tensor) -> bool:
    """Return True for a tensor of :data:`LARGE` elements or more."""
    return tensor.numel() >= LARGE


def tensors_of(leaf: Leaf) -> list[Tensor]:
    """Param, gradient, and the tensors of all states, in order."""
    found = [leaf.param, leaf.grad]
    for state in leaf.states:
        for value in state:
            if isinstance(value, list):
                found += value
            else:
                found.append(value)
    return found


def with_tensors(leaf: Leaf, tensors: Sequence[Tensor]) -> Leaf:
    """The leaf with other tensors in the places of its own."""
    left = iter(tensors)
    param, grad = next(left), next(left)
    states = tuple(map_state(lambda _: next(left), state) for state in leaf.states)
    return leaf._replace(param=param, grad=grad, states=states)


def part(tensors: Sequence[Tensor], block_size: int, start: int, stop: int) -> list[Tensor]:
    """Return elements [start, stop) of a chunk, of each of its tensors.

    Args:
        tensors: of a chunk, 1-D, the parameter first; each has as many elements as that, or one for
            each block of ``block_size``.
        block_size: the granularity of the chain.
        start: a multiple of ``block_size``.
        stop: too, or the end of the chunk.
    """
    count = tensors[0].numel()
    return [
        tensor[start:stop]
        if tensor.numel() == count
        else tensor[start // block_size : -(-stop // block_size)]
        for tensor in tensors
    ]


NOTED: dict[tuple[Stage, ...], str] = {}
"""Pointwise chains whose leaves are stepped as they are, and why (see ``rounding``)."""


def why_not_pointwise(stages: Sequence[Stage]) -> str | None:
    """Return why a chain cannot be stepped in chunks; None if it can."""
    whole = [stage.name for stage in stages if stage.kind != "pointwise"]
    if whole:
        return f"{whole[0]} needs its whole tensor"
    return NOTED.get(tuple(stages)) if NOTED else None


def why_not_flat(stages: Sequence[Stage], leaf: Leaf, block_size: int | None = None) -> str | None:
    """Return why a leaf cannot be a chunk or part of one; None if it can."""
    param, blocks = leaf.param, block_size_of(stages) if block_size is None else block_size
    count, has_no_dims = param.numel(), not param.dim()
    allowed = count, -(-count // blocks)
    for tensor in tensors_of(leaf):
        if tensor.numel() not in allowed or (not tensor.dim()) != has_no_dims:
            return f"{leaf.name!r} keeps a state of another shape than the parameter"
    return None


def flat_view(tensor: Tensor, like: Tensor) -> Tensor | None:
    """A tensor's elements as they lie in memory, if they lie densely, ordered as in ``like``."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.detach().view(-1)
    if _strides(tensor) != _strides(like) or not is_dense(tensor):
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _strides(tensor: Tensor) -> list[int]:
    """The strides that mean anything."""
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
    """Return True if a tensor fills its memory, each element at an address of its own."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def aliased_places(leaves: Sequence[Leaf]) -> set[int]:
    """Places of the leaves that others may write to: those are stepped one after the other.

    A tensor with gaps counts with its gaps.
    """
    starts: list[int] = []
    ends: list[int] = []
    owners: list[int] = []
    written: list[bool] = []
    for index, leaf in enumerate(leaves):
        for k, tensor in enumerate(tensors_of(leaf)):
            start = tensor.data_ptr()
            if start:
                size = tensor.nbytes if tensor.is_contiguous() else extent_of(tensor)
                starts.append(start)
                ends.append(start + size)
                owners.append(index)
                written.append(k != 1)
    if _are_apart(starts, ends):  # as a rule
        return set()
    spans = sorted(zip(starts, ends, owners, written, strict=True))
    found: set[int] = set()
    last = last_written = (0, 0)  # (end, whose) of all spans so far, and of those that are written
    for start, end, index, is_written in spans:
        reaching = last if is_written else last_written
        if start < reaching[0] and index != reaching[1]:
            found |= {index, reaching[1]}
        last = max(last, (end, index))
        if is_written:
            last_written = max(last_written, (end, index))
    return found


def _are_apart(starts: list[int], ends: list[int]) -> bool:
    """Return True if no two of these ranges of addresses overlap. No Python runs per range."""
    order = sorted(range(len(starts)), key=starts.__getitem__)
    following = islice(map(starts.__getitem__, order), 1, None)
    return all(map(le, map(ends.__getitem__, order), following))


def extent_of(tensor: Tensor) -> int:
    """The bytes from the first element of a tensor to its last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (1 + sum(steps)) * tensor.element_size()


def is_chunk(leaf: Leaf) -> bool:
    """Return True if the tensors of a leaf lie in one order, and share no memory."""
    tensors = tensors_of(leaf)
    for one in tensors:
        if not one.is_contiguous() or one.is_conj() or one.is_neg():
            return as_chunk(leaf) is not None
    return are_disjoint(tensors)


def as_chunk(leaf: Leaf) -> Leaf | None:
    """A leaf whose every tensor is a view of its memory in one order; None if there is none."""
    views = []
    blocks = any(tensor.shape != leaf.param.shape for tensor in tensors_of(leaf))
    if blocks and not leaf.param.is_contiguous():
        return None  # blocks of elements follow each other in the order of the shape
    for tensor in tensors_of(leaf):
        view = flat_view(tensor, leaf.param if tensor.shape == leaf.param.shape else tensor)
        if view is None:
            return None
        views.append(view)
    if not are_disjoint(views):
        return None
    return with_tensors(leaf, views)


def joined(stages: Sequence[Stage], leaves: Sequence[Leaf], left: list[Leaf]) -> list[list[Leaf]]:
    """Leaves that can be stepped where they lie, as chunks.

    Args:
        stages: of the chain, all pointwise.
        leaves: with gradients.
        left: takes the leaves that cannot; what is all empty goes nowhere.

    Returns:
        Groups of leaves that share coefficients, device and dtypes.
    """
    found: dict[Any, list[Leaf]] = {}
    aliased, block_size = aliased_places(leaves), block_size_of(stages)
    for index, leaf in enumerate(leaves):
        if leaf.param.numel() == 0:
            left += [leaf] * counts_without_elements(leaf)
            continue
        flat = index not in aliased and why_not_flat(stages, leaf, block_size) is None
        if flat and is_chunk(leaf):
            found.setdefault(pack_key(leaf), []).append(leaf)
        else:
            left.append(leaf)
    return list(found.values())


def counts_without_elements(leaf: Leaf) -> bool:
    """Return True if a step of a leaf without elements changes a number in its state."""
    return any(tensor.numel() for tensor in tensors_of(leaf))


def pack_key(leaf: Leaf) -> Any:
    """Return the key that leaves which are stepped together have in common."""
    dtypes = tuple([tensor.dtype for tensor in tensors_of(leaf)])
    return id(leaf.coefficients), leaf.param.device, dtypes
