"""Tests of the NCCL transport's calls; ``tests/cuda`` tests its collectives on a device."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharding.transport import NcclTransport, nccl
from tests.choices import examples
from tests.transport.buffers import gradient, same


class Calls:
    """Stand-in for torch.distributed in a world of ``terms``, which adds and copies at once."""

    def __init__(self, terms: list[Tensor], rank: int, ranges: list[tuple[int, int]]) -> None:
        self.terms, self.rank, self.ranges = terms, rank, ranges
        self.names: list[str] = []

    def _add(self, output: Tensor) -> Any:
        start, stop = self.ranges[self.rank]
        total = sum(term[start:stop] for term in self.terms)

        def wait() -> None:
            output.copy_(total)

        return SimpleNamespace(wait=wait)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, **_: Any) -> Any:
        self.names.append("reduce_scatter_single")
        assert whole.numel() == len(self.terms) * output.numel()
        assert output.data_ptr() == whole[self.rank * output.numel() :].data_ptr() or not len(whole)
        return self._add(output)

    def reduce_scatter(self, output: Tensor, pieces: list[Tensor], **_: Any) -> Any:
        self.names.append("reduce_scatter")
        lengths = [piece.numel() for piece in pieces]
        assert lengths == [b - a for a, b in self.ranges]
        assert len(set(lengths)) > 1, "torch would copy them, and let go of the copy too early"
        return self._add(output)

    def all_gather_single(self, whole: Tensor, own: Tensor, **_: Any) -> Any:
        self.names.append("all_gather_single")
        return self._hand_on(list(whole.chunk(len(self.terms))), own)

    def all_gather(self, pieces: list[Tensor], own: Tensor, **_: Any) -> Any:
        self.names.append("all_gather")
        assert len(set(map(len, pieces))) > 1
        return self._hand_on(pieces, own)

    def _hand_on(self, pieces: list[Tensor], own: Tensor) -> Any:
        assert own.data_ptr() == pieces[self.rank].data_ptr()
        start, stop = self.ranges[self.rank]
        assert same(own, self.terms[self.rank][start:stop].view(torch.uint8))

        def wait() -> None:
            for piece, term, (first, last) in zip(pieces, self.terms, self.ranges, strict=False):
                piece.copy_(term[first:last].view(torch.uint8))

        return SimpleNamespace(wait=wait)


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw adjacent ranges of any size, or ranges of equal size in any order with gaps."""
    size = draw(st.integers(2, 5))
    if draw(st.booleans()):
        each, start, gap = (draw(st.integers(low, high)) for low, high in ((0, 9), (0, 3), (0, 2)))
        order = draw(st.permutations(range(size))) if draw(st.booleans()) else range(size)
        step = each + gap
        return [(start + q * step, start + q * step + each) for q in order]
    return list(pairwise([0, *sorted(draw(st.tuples(*[st.integers(0, 30)] * size)))]))


@examples(40)
@given(cuts(), st.data())
def test_nccl_calls(ranges: list[tuple[int, int]], data: st.DataObject) -> None:
    """Ranges of equal size take the ``_single`` collectives; other ranges take lists of pieces."""
    size = len(ranges)
    rank = data.draw(st.integers(0, size - 1))
    terms = [gradient(q, max(b for _, b in ranges) + 2, torch.float32) for q in range(size)]
    calls = Calls(terms, rank, ranges)
    tail = "_single" if len({stop - start for start, stop in ranges}) == 1 else ""
    expected = [f"reduce_scatter{tail}", f"all_gather{tail}"]
    flat, own = terms[rank].clone(), slice(*ranges[rank])
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    with pytest.MonkeyPatch.context() as patch:
        for name in expected:
            patch.setattr(nccl.dist, name, getattr(calls, name))
        transport = NcclTransport(group)
        work = transport.reduce_scatter(flat, ranges)
        work.wait()
        total = sum(term[own] for term in terms)
        assert torch.equal(flat[own], total)
        flat[own] = terms[rank][own]
        if not _lies_there(ranges):
            work.wait()  # only the first wait copies the result to its range
            assert torch.equal(flat[own], terms[rank][own])
        gathering = transport.all_gather(flat, ranges)
        gathering.wait()
    for q, (start, stop) in enumerate(ranges):
        assert same(flat[start:stop], terms[q][start:stop])
    gaps = torch.ones(len(flat), dtype=torch.bool)
    for start, stop in ranges:
        gaps[start:stop] = False
    assert torch.equal(flat[gaps], terms[rank][gaps])
    assert calls.names == expected
    lengths = [4 * (stop - start) for start, stop in ranges]
    sent = 2 * sum(lengths) - lengths[rank] - lengths[(rank + 1) % size]
    assert transport.bytes_sent == sent


def _lies_there(ranges: list[tuple[int, int]]) -> bool:
    """Return True if a collective can work on the ranges where they are stored."""
    of_one_size = len({stop - start for start, stop in ranges}) == 1
    return not of_one_size or all(one[1] == other[0] for one, other in pairwise(ranges))
