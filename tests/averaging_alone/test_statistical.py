"""Quantiser whose levels are the means of bins."""

import math
from itertools import pairwise

import torch

from hooks.averaging.contrib import Statistical
from hooks.averaging.contrib.statistical import lloyd_max_edges, sum_rows

from ..choices import case
from ..tensors import normal
from .support import arrived


def test_each_element_arrives_as_the_mean_of_its_bin() -> None:
    flat = normal(500, seed=1) * 3 + 1
    for bits, edges in ((2, None), (1, None), (4, None), (2, (-2.25, -0.75, 0.75))):
        with case(bits=bits, edges=edges):
            got = arrived(Statistical(bits=bits, block=200, edges=edges), flat)
            for block, of_block in zip(flat.split(200), got.split(200), strict=True):
                x = block.double()
                cuts = x.std(correction=0) * torch.tensor(edges or lloyd_max_edges(bits)) + x.mean()
                bins = torch.bucketize(x, cuts.double())
                for number in bins.unique():
                    mean = x[bins == number].mean()
                    torch.testing.assert_close(
                        of_block[bins == number].double(), mean.expand(int((bins == number).sum()))
                    )


def test_the_sum_of_a_block_arrives() -> None:
    flat = normal(3000, seed=2) + 0.3
    for compression in (Statistical(bits=1), Statistical(), Statistical(bits=4, block=100)):
        with case(compression=compression):
            got = arrived(compression, flat)
            for one, other in zip(
                flat.split(compression.block), got.split(compression.block), strict=True
            ):
                torch.testing.assert_close(other.double().sum(), one.double().sum())


def test_blocks_of_few_different_numbers_arrive_as_they_are() -> None:
    for flat in (
        torch.full((1025,), 0.1),
        torch.full((7,), -3e-45),
        torch.full((2000,), torch.finfo(torch.float32).max),
        torch.tensor([0.1, -0.7]).repeat(512),
    ):
        with case(flat=flat):
            for compression in (Statistical(bits=1), Statistical(), Statistical(bits=4)):
                assert torch.equal(arrived(compression, flat), flat)


def test_edges_are_best_for_a_normal_distribution() -> None:
    """Each edge is midway between the means of its two bins (Lloyd's condition)."""
    for bits in (1, 2, 4):
        with case(bits=bits):
            edges = lloyd_max_edges(bits)
            ends = [-math.inf, *edges, math.inf]
            means = [
                (_density(one) - _density(other)) / (_below(other) - _below(one))
                for one, other in pairwise(ends)
            ]
            assert len(means) == 2**bits
            for edge, (one, other) in zip(edges, pairwise(means), strict=True):
                assert abs(edge - (one + other) / 2) < 2e-4


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def test_rows_are_summed_by_halves_in_float64() -> None:
    for width in (1, 2, 3, 7, 8, 100):
        with case(width=width):
            rows = normal(3, width, seed=width)
            before = rows.clone()
            expected = []
            for row in rows.double().tolist():
                left = row
                while len(left) > 1:
                    half = (len(left) + 1) // 2
                    second = [*left[half:], *[0.0] * half]
                    left = [a + b for a, b in zip(left[:half], second, strict=False)]
                expected.append(left)
            assert sum_rows(rows).tolist() == expected
            assert sum_rows(rows.double()).tolist() == expected
            assert torch.equal(rows, before)
