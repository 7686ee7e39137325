"""A rank is lost in the middle of a step under overlap: training goes on from the last save."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.ranks import Job, Outcomes, run_ranks

from . import resumed

VICTIM = 2
AFTERWARDS = ((4, "elements"), (2, "sliced"), (2, "greedy"), (1, "elements"))
"""Numbers of ranks that go on, and by which policy."""


def launch(base: Path) -> Outcomes:
    for name in ("network", "memory"):
        (base / name).mkdir()
    folder = {"folder": str(base / "network")}
    memory = {"folder": str(base / "memory"), "victim": VICTIM, "memory": True}
    found: Outcomes = run_ranks({"dies, memory": Job(resumed.dies, memory, 5)}, ranks=4, seconds=40)
    job = Job(resumed.dies, {**folder, "victim": VICTIM, "memory": False}, 5)
    found |= run_ranks({"dies": job}, ranks=4, seconds=40)
    for ranks, policy in AFTERWARDS:
        job = Job(resumed.goes_on, {**folder, "policy": policy})
        found |= run_ranks({f"{ranks} {policy}": job}, ranks=ranks, seconds=60)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("resumed"))


def test_ranks_differ_and_their_mean_does_not() -> None:
    """The data is such that the number of ranks makes no difference, to the bit."""
    for ranks in (1, 2, 4):
        every = [resumed.weights(5, 2 * rank - (ranks - 1)) for rank in range(ranks)]
        for parts in zip(*every, resumed.weights(5), strict=True):
            *mine, mean = parts
            assert torch.equal(sum(one / ranks for one in mine), mean)
            assert all(not torch.equal(a, b) for a, b in pairwise(mine))


@pytest.mark.parametrize("way", ["dies", "dies, memory"])
@pytest.mark.parametrize("rank", [rank for rank in range(4) if rank != VICTIM])
def test_all_others_end_and_name_a_rank_that_is_gone(
    outcomes: Outcomes, rank: int, way: str
) -> None:
    """The one that died, or one that ended because of it."""
    seen = outcomes[way][rank].result()
    assert seen["raised"], "it went on"
    assert "group rank" in seen["raised"][1], seen["raised"][1]
    assert seen["seconds"] < 20
    assert outcomes[way][VICTIM].error is not None


@pytest.mark.parametrize("way", ["dies", "dies, memory"])
def test_the_rank_that_died_is_named(outcomes: Outcomes, way: str) -> None:
    texts = [outcomes[way][rank].result()["raised"][1] for rank in range(4) if rank != VICTIM]
    assert any(f"group rank {VICTIM} (global rank {VICTIM})" in text for text in texts)


@pytest.mark.parametrize(("ranks", "policy"), AFTERWARDS)
def test_what_was_saved_goes_on_bit_for_bit(outcomes: Outcomes, ranks: int, policy: str) -> None:
    for outcome in outcomes[f"{ranks} {policy}"]:
        seen = outcome.result()
        assert seen == {"moved": [True] * len(resumed.SIZES), "same": [True] * len(resumed.SIZES)}
