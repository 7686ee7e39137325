"""Leaves as chunks: elements in one piece of memory, which kernels work through.

A large leaf that fills its memory is a chunk as it stands. Small ones that share coefficients are
packed: gathered into blocks of scratch, stepped together, and written back.
"""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.brief import and_more
from functional_optim.core.forms import map_state
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.scratch import scratch

POINTER = ctypes.c_void_p


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
        """The same leaves with gradients that lie elsewhere."""
        where: Any = gradients
        if not isinstance(gradients, bytes):
            where = (POINTER * len(gradients))(*gradients)
        return Table(self.elements, self.leaves, self.lengths, self.addresses, where)

    @classmethod
    def of_tensors(cls, leaves: Sequence[Sequence[Tensor]]) -> "Table":
        """The table of leaves, of which each is its tensors, the parameter first."""
        lengths = [tensors[0].numel() for tensors in leaves]
        return cls.of(lengths, [one.data_ptr() for tensors in leaves for one in tensors])


LARGE = 1 << 16
"""Elements from which a leaf is a chunk of its own: the call is then cheap beside the work."""

PACK = 1 << 20
"""Most elements that are packed into one chunk."""


class Chunk(NamedTuple):
    """One chunk and the leaves in it."""

    leaf: Leaf
    """As kernels take it: 1-D, contiguous."""
    packed: tuple[Leaf, ...]
    """The leaves that were gathered into it; none where it is the memory of a leaf itself."""


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
    """What elements [start, stop) of a chunk have in each of its tensors.

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


def why_not_pointwise(stages: Sequence[Stage]) -> str | None:
    """Why a chain cannot be cut at all; None if it can."""
    whole = [stage.name for stage in stages if stage.kind != "pointwise"]
    return f"{whole[0]} needs its whole tensor" if whole else None


def why_not_flat(stages: Sequence[Stage], leaf: Leaf) -> str | None:
    """Why a leaf cannot be (part of) a chunk; None if it can."""
    block_size = block_size_of(stages)
    allowed = {leaf.param.numel(), -(-leaf.param.numel() // block_size)}
    for tensor in tensors_of(leaf):
        if tensor.numel() not in allowed or (tensor.dim() == 0) != (leaf.param.dim() == 0):
            return f"{leaf.name!r} keeps a state of another shape than the parameter"
    return None


def flat_view(tensor: Tensor, like: Tensor) -> Tensor | None:
    """A tensor's elements as they lie in memory, if they lie densely, ordered as in ``like``."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.detach().view(-1)
    if _strides(tensor) != _strides(like) or not _is_dense(tensor):
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _strides(tensor: Tensor) -> list[int]:
    """The strides that mean anything."""
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def are_disjoint(tensors: Sequence[Tensor]) -> bool:
    """Whether no two of these contiguous tensors share memory."""
    spans = sorted((t.data_ptr(), t.numel() * t.element_size()) for t in tensors if t.numel())
    return all(a + size <= b for (a, size), (b, _) in pairwise(spans))


def _is_dense(tensor: Tensor) -> bool:
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
    spans = []
    for index, leaf in enumerate(leaves):
        for k, tensor in enumerate(tensors_of(leaf)):
            start = tensor.data_ptr()
            if start:
                spans.append((start, start + _extent(tensor), index, k != 1))
    spans.sort()
    found: set[int] = set()
    last = last_written = (0, 0)  # (end, whose) of all spans so far, and of those that are written
    for start, end, index, written in spans:
        reaching = last if written else last_written
        if start < reaching[0] and index != reaching[1]:
            found |= {index, reaching[1]}
        last = max(last, (end, index))
        if written:
            last_written = max(last_written, (end, index))
    return found


def _extent(tensor: Tensor) -> int:
    """The bytes from the first element of a tensor to its last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (1 + sum(steps)) * tensor.element_size()


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


def joined(
    stages: Sequence[Stage], leaves: Sequence[Leaf], left: list[Leaf]
) -> list[list[tuple[Leaf, Leaf]]]:
    """Leaves that can be stepped where they lie, together with their chunks.

    Args:
        stages: of the chain, all pointwise.
        leaves: with gradients.
        left: takes the leaves that cannot; what is all empty goes nowhere.

    Returns:
        Groups of leaves that share coefficients, device and dtypes.
    """
    found: dict[Any, list[tuple[Leaf, Leaf]]] = {}
    aliased = aliased_places(leaves)
    for index, leaf in enumerate(leaves):
        if leaf.param.numel() == 0:
            left += [leaf] * _counts(leaf)
            continue
        flat = index not in aliased and why_not_flat(stages, leaf) is None
        view = as_chunk(leaf) if flat else None
        if view is None:
            left.append(leaf)
        else:
            found.setdefault(_pack_key(leaf), []).append((leaf, view))
    return list(found.values())


def chunks(
    stages: Sequence[Stage],
    leaves: Sequence[Leaf],
    others: list[Leaf],
    *,
    exact: bool = False,
    fresh: bool = False,
) -> Iterator[Chunk]:
    """Leaves as chunks, one at a time: packs share their scratch, so use one before the next.

    Args:
        stages: of the chain, all pointwise.
        leaves: with gradients.
        others: takes the leaves that cannot be chunks.
        exact: pack nothing where that shows: torch's kernels for 16-bit floats round the last
            elements of a tensor, past its last whole vector, in another way.
        fresh: whether packs have memory of their own: what captures a step goes on using it.
    """
    small: dict[Any, list[Leaf]] = {}
    aliased = aliased_places(leaves)
    for index, leaf in enumerate(leaves):
        if leaf.param.numel() == 0:
            others += [leaf] * _counts(leaf)
            continue
        alone = exact and leaf.param.dtype.itemsize <= 2
        flat = index not in aliased and why_not_flat(stages, leaf) is None
        view = as_chunk(leaf) if flat and (alone or leaf.param.numel() >= LARGE) else None
        if view is not None:
            yield Chunk(view, ())
        elif not flat or alone or leaf.param.numel() > PACK:
            others.append(leaf)
        else:
            small.setdefault(_pack_key(leaf), []).append(leaf)
    for alike in small.values():
        yield from _packed(stages, alike, fresh=fresh)


def _counts(leaf: Leaf) -> bool:
    """Whether a step of a leaf without elements changes something: a number that is its state."""
    return any(tensor.numel() for tensor in tensors_of(leaf))


def _packed(stages: Sequence[Stage], alike: Sequence[Leaf], *, fresh: bool) -> Iterator[Chunk]:
    """Small leaves together."""
    for pack in small_packs(alike, block_size_of(stages)):
        view = as_chunk(pack[0]) if len(pack) == 1 else None
        yield _gathered(pack, fresh=fresh) if view is None else Chunk(view, ())


def _pack_key(leaf: Leaf) -> Any:
    dtypes = tuple(tensor.dtype for tensor in tensors_of(leaf))
    return id(leaf.coefficients), leaf.param.device, dtypes


def small_packs(leaves: Sequence[Leaf], block_size: int) -> Iterator[list[Leaf]]:
    """Leaves in runs of at most PACK elements; only the last may end within a block."""
    run: list[Leaf] = []
    count = 0
    for leaf in leaves:
        size = leaf.param.numel()
        if run and (count % block_size or count + size > PACK):
            yield run
            run, count = [], 0
        run.append(leaf)
        count += size
    if run:
        yield run


def _gathered(pack: Sequence[Leaf], *, fresh: bool) -> Chunk:
    """Leaves copied into scratch, one after the other."""
    flat = []
    for index, column in enumerate(zip(*(tensors_of(leaf) for leaf in pack), strict=True)):
        pieces = [tensor.detach().reshape(-1) for tensor in column]
        like, length = pieces[0], sum(piece.numel() for piece in pieces)
        into = None if fresh else scratch(("pack", index), length, like.dtype, like.device)
        flat.append(torch.cat(pieces, out=into))
    name = and_more(pack[0].name, len(pack) - 1)
    return Chunk(with_tensors(pack[0]._replace(name=name), flat), tuple(pack))


def scatter(chunk: Chunk) -> None:
    """Write a packed chunk's param and states back to its leaves."""
    if not chunk.packed:
        return
    flat = tensors_of(chunk.leaf)
    columns = list(zip(*(tensors_of(leaf) for leaf in chunk.packed), strict=True))
    for index, (whole, column) in enumerate(zip(flat, columns, strict=True)):
        if index == 1:  # the gradient is only read
            continue
        targets = [tensor.detach() for tensor in column]
        pieces = whole.split([target.numel() for target in targets])
        shaped = [piece.view(target.shape) for piece, target in zip(pieces, targets, strict=True)]
        foreach_copy_(targets, shaped)
