"""The NCCL transport's calls (its collectives themselves need a device: see ``tests/cuda``)."""

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
    """Stands for torch.distributed in a world of ``terms``: adds and hands on at once."""

    def __init__(self, terms: list[Tensor], rank: int, ranges: list[tuple[int, int]]) -> None:
        self.terms, self.rank, self.ranges = terms, rank, ranges
        self.names: list[str] = []

    def _add(self, output: Tensor) -> Any:
        start, stop = self.ranges[self.rank]
        output.copy_(sum(term[start:stop] for term in self.terms))
        return SimpleNamespace(wait=lambda: None)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, **_: Any) -> Any:
        self.names.append("reduce_scatter_single")
        assert whole.numel() == len(self.terms) * output.numel()
        assert output.data_ptr() == whole[self.rank * output.numel() :].data_ptr() or not len(whole)
        return self._add(output)

    def reduce_scatter(self, output: Tensor, pieces: list[Tensor], **_: Any) -> Any:
        self.names.append("reduce_scatter")
        assert [piece.numel() for piece in pieces] == [b - a for a, b in self.ranges]
        return self._add(output)

    def all_gather_single(self, whole: Tensor, own: Tensor, **_: Any) -> Any:
        return self.all_gather(list(whole.chunk(len(self.terms))), own, name="all_gather_single")

    def all_gather(self, pieces: list[Tensor], own: Tensor, name: str = "all_gather", **_: Any):
        self.names.append(name)
        assert own.data_ptr() == pieces[self.rank].data_ptr()
        for piece, term, (start, stop) in zip(pieces, self.terms, self.ranges, strict=False):
            piece.copy_(term[start:stop].view(torch.uint8))
        return SimpleNamespace(wait=lambda: None)


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges side by side, of one size or of any."""
    size = draw(st.integers(2, 5))
    if draw(st.booleans()):
        each, start = draw(st.integers(1, 9)), draw(st.integers(0, 3))
        return [(start + q * each, start + (q + 1) * each) for q in range(size)]
    return list(pairwise([0, *sorted(draw(st.tuples(*[st.integers(0, 30)] * size)))]))


@examples(20)
@given(cuts(), st.data())
def test_nccl_calls(ranges: list[tuple[int, int]], data: st.DataObject) -> None:
    """Ranges of one size take one collective each; others, one for each rank."""
    size = len(ranges)
    rank = data.draw(st.integers(0, size - 1))
    terms = [gradient(q, ranges[-1][1] + 2, torch.float32) for q in range(size)]
    calls = Calls(terms, rank, ranges)
    tail = "_single" if len({stop - start for start, stop in ranges}) == 1 else ""
    expected = [f"reduce_scatter{tail}", f"all_gather{tail}"]
    flat, own = terms[rank].clone(), slice(*ranges[rank])
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    with pytest.MonkeyPatch.context() as patch:
        for name in expected:
            patch.setattr(nccl.dist, name, getattr(calls, name))
        transport = NcclTransport(group)
        transport.reduce_scatter(flat, ranges).wait()
        assert torch.equal(flat[own], sum(term[own] for term in terms))
        transport.all_gather(flat, ranges).wait()
    for q, (start, stop) in enumerate(ranges):
        assert same(flat[start:stop], terms[q][start:stop])
    assert calls.names == expected
    covered = 4 * (ranges[-1][1] - ranges[0][0])
    after = ranges[(rank + 1) % size]
    own_bytes = 4 * (own.stop - own.start)
    assert transport.bytes_sent == 2 * covered - own_bytes - 4 * (after[1] - after[0])
