"""Tests that training continues from the last checkpoint after a rank died in a step."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.ranks import Job, Outcomes, run_at_once

from . import resumed

VICTIM = 2
WAYS = {"network": False, "memory": True}
AFTERWARDS = ((4, "elements"), (2, "sliced"), (1, "greedy"))
"""Number of ranks that continue, and their policy."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumed")


@pytest.fixture(scope="module")
def outcomes(base: Path) -> Outcomes:
    jobs = {}
    for way, memory in WAYS.items():
        (base / way).mkdir()
        given = {"folder": str(base / way), "victim": VICTIM, "memory": memory}
        jobs[way] = Job(resumed.dies, given)
    return run_at_once(jobs, ranks=4, seconds=120)


def test_ranks_differ_and_their_mean_does_not() -> None:
    """The mean of the ranks' data is the same on any number of ranks, bit for bit."""
    for ranks in (1, 2, 4):
        every = [resumed.weights(5, 2 * rank - (ranks - 1)) for rank in range(ranks)]
        for parts in zip(*every, resumed.weights(5), strict=True):
            *mine, mean = parts
            assert torch.equal(sum(one / ranks for one in mine), mean)
            assert all(not torch.equal(a, b) for a, b in pairwise(mine))


@pytest.mark.parametrize("way", WAYS)
def test_all_others_end_and_name_a_rank_that_is_gone(outcomes: Outcomes, way: str) -> None:
    """All other ranks end with an error that names a lost rank, and some error names the victim."""
    assert outcomes[way][VICTIM].error is not None
    raised = [outcomes[way][rank].result() for rank in range(4) if rank != VICTIM]
    assert all(raised), "one went on"
    assert all("group rank" in text for _, text in raised), raised
    victim = f"group rank {VICTIM} (global rank {VICTIM})"
    assert any(victim in text for _, text in raised), raised


@pytest.mark.usefixtures("outcomes")
def test_what_was_saved_goes_on_bit_for_bit(base: Path) -> None:
    for ranks, policy in AFTERWARDS:
        for way in WAYS:
            with case(ranks=ranks, policy=policy, way=way):
                LocalWorld(ranks).run(
                    lambda group, way=way, policy=policy: resumed.goes_on(group, base / way, policy)
                )
