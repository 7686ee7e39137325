"""Check that no two parameters share a part of their memory."""

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from operator import add, attrgetter, le
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.tensors import DisableTorchFunction

_NBYTES = attrgetter("nbytes")


def check_no_overlap(params: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise ValueError if two parameters share a part of their memory.

    A step would write the shared elements twice, once for each parameter. The result would depend
    on the order of the writes, and a copy on another rank would miss one of them.

    Views without a common element are accepted, such as the columns of a matrix. Tied parameters,
    with exactly the same elements, are accepted too: the callers decide about them. Tensors without
    memory of their own are not checked. Only if ranges of addresses overlap, their bytes are marked
    one by one.
    """
    with DisableTorchFunction():
        if _are_runs_separate(params):
            return
        pair = next(filter(None, map(_overlapping_pair, _clusters(_ranges_of(params)))), None)
    if pair is None:
        return
    named = names()
    one, other = [f"{named[k]!r} of shape {tuple(params[k].shape)}" for k in sorted(pair)]
    raise ValueError(
        f"the parameters {one} and {other} share a part of their memory, so a step would change "
        "some elements twice; parameters must be separate tensors, or one tensor that is given "
        "once, as tied weights are. Either clone() one of the two, or give the tensor that both "
        "are views of, and let the model take the views from it"
    )


class _Range(NamedTuple):
    """Addresses of a tensor, without those of dimensions that repeat the same elements."""

    device: str
    start: int
    end: int
    """The address after the last byte."""
    position: int
    """The position of the parameter in the list."""
    dims: tuple[tuple[int, int], ...]
    """(count, stride) of each dimension, in bytes: first the run of bytes, of stride 1."""


def _are_runs_separate(params: Sequence[Any]) -> bool:
    """Return True if all are contiguous tensors in disjoint ranges of addresses.

    No Python code runs for each tensor.
    """
    if not all(map(_has_own_memory, set(map(type, params)))):
        return False
    try:
        if not all(map(Tensor.is_contiguous, params)):
            return False
        starts = list(map(Tensor.data_ptr, params))
        ends = list(map(add, starts, map(_NBYTES, params)))
    except (NotImplementedError, RuntimeError):  # one of them has no storage
        return False
    # At each address, at most one range has begun and not ended.
    return all(map(le, sorted(ends), sorted(starts)[1:]))


def _has_own_memory(kind: type) -> bool:
    """Return True for a class of tensors that wraps no other tensors."""
    return issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _ranges_of(params: Sequence[Any]) -> list[_Range]:
    """Return the range of each parameter with memory, sorted; tied parameters have one range."""
    found: dict[Any, _Range] = {}
    for position, one in enumerate(params):
        if not _has_own_memory(type(one)) or one.layout != torch.strided or one.is_nested:
            continue
        try:
            start = one.data_ptr()
        except (NotImplementedError, RuntimeError):  # inside a transform of torch.func
            continue
        if not start or not one.numel():
            continue
        key = _dims_of(one)
        end = start + 1 + sum((count - 1) * stride for count, stride in key)
        given = str(one.device), start, end, position, key
        found.setdefault((given[:3], key), _Range(*given))
    return sorted(found.values())


def _dims_of(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the dimensions by stride, in a form that depends on the bytes only."""
    dims = [(tensor.itemsize, 1)]
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, count in sorted((stride * tensor.itemsize, count) for stride, count in pairs):
        if count == 1 or stride == 0:
            continue
        if stride == dims[-1][0] * dims[-1][1]:  # rows one after another
            dims[-1] = dims[-1][0] * count, dims[-1][1]
        else:
            dims.append((count, stride))
    return tuple(dims)


def _clusters(ranges: Sequence[_Range]) -> Iterator[list[_Range]]:
    """Yield runs of sorted ranges, each of which overlaps one of the ranges before it."""
    cluster: list[_Range] = []
    end = 0
    for one in ranges:
        if cluster and (one.device != cluster[0].device or one.start >= end):
            yield cluster
            cluster = []
        end = max(end, one.end) if cluster else one.end
        cluster.append(one)
    yield cluster


def _overlapping_pair(cluster: Sequence[_Range]) -> tuple[int, int] | None:
    """Return the positions of two ranges with a common byte, or None."""
    if len(cluster) < 2:
        return None
    first = cluster[0].start
    # The unit is the largest in which all addresses are whole numbers, usually the element.
    runs = [one.dims[0][0] for one in cluster]
    strides = [stride for one in cluster for _, stride in one.dims[1:]]
    unit = gcd(*runs, *strides, *[one.start - first for one in cluster])
    count = (max(one.end for one in cluster) - first) // unit
    marks = torch.zeros(count, dtype=torch.int32, device="cpu")
    for number, one in enumerate(cluster, start=1):
        (run, _), *outer = one.dims
        sizes = [run // unit, *[size for size, _ in outer]]
        own = marks.as_strided(
            sizes, [1, *[stride // unit for _, stride in outer]], (one.start - first) // unit
        )
        known = int(own.amax())
        if known:
            return cluster[known - 1].position, one.position
        own.fill_(number)
    return None
