"""Tests of the bytes and of the order of a sum over all ranks."""

import functools
from typing import Any

import torch
from torch import Tensor

from sharding import ParameterSpec, ShardPlan, plan
from sharding.transport import make_transport
from sharding.transport.local import LocalWorld
from sharding.zero.groups import sum_over_ranks, sum_vector
from tests.choices import case

CPU = torch.device("cpu")
PARAMS = 50


def addends_of(rank: int, bucket: int, rows: int) -> Tensor:
    """Return values of many magnitudes, so that each order of addition has different bits."""
    generator = torch.Generator().manual_seed(10 * rank + bucket)
    shape = (rows, PARAMS) if rows else (PARAMS,)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return numbers * 10.0 ** torch.randint(-8, 8, shape, generator=generator)


def summed(vector: Tensor) -> Tensor:
    return (
        torch.stack(list(map(sum_vector, vector.unbind())))
        if vector.dim() > 1
        else sum_vector(vector)
    )


def test_each_rank_sends_a_few_numbers_for_each_parameter() -> None:
    """Fault 38: every rank sent all its values to every other rank, and stored all values."""
    specs = [
        ParameterSpec(f"p{place}", (4,), torch.float32, "cpu", True, "pointwise", 0)
        for place in range(PARAMS)
    ]
    for ranks, rows, replicas in ((1, 0, 1), (3, 0, 1), (4, 2, 1), (4, 0, 2), (6, 0, 1)):
        within = plan(specs, ranks // replicas, "elements")
        made = ShardPlan(ranks, within.specs, within.pieces, within.policy, replicas)
        terms = [
            functools.reduce(torch.add, [addends_of(rank, bucket, rows) for bucket in range(3)])
            for rank in range(made.shard_ranks)
        ]
        expected = summed(functools.reduce(torch.add, terms))

        def taken(group: Any, made: Any = made, rows: int = rows) -> tuple[Tensor, int]:
            transport, rank = make_transport(group), group.rank() % made.shard_ranks
            own = [addends_of(rank, bucket, rows) for bucket in range(3)]
            found = sum_over_ranks(own, own[0].shape, made, transport, CPU)
            return summed(found), transport.bytes_sent

        with case(ranks=ranks, rows=rows, replicas=replicas):
            for found, sent in LocalWorld(ranks).run(taken):
                assert torch.equal(found, expected)
                numbers = PARAMS * (rows or 1)
                assert sent <= 2 * 8 * (numbers + ranks)
