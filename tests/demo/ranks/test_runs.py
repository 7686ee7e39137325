"""Tests of the demo on three processes, and with averaged parameters.

They use the pool of ranks, since each new rank of torchrun needs seconds to import torch.
"""

from pathlib import Path

import pytest

from hooks.demo.front_ends import WARMUP
from hooks.demo.result import RankResult, judge, load, loss_difference
from hooks.demo.settings import Settings
from tests.demo.ranks import jobs
from tests.ranks import Job, run_ranks


def on_ranks(settings: Settings, folder: Path) -> list[RankResult]:
    """Return the results of all ranks."""
    job = Job(jobs.train, {"settings": settings.to_json(), "folder": str(folder)})
    outcomes = run_ranks({"demo": job}, ranks=settings.ranks, seconds=300)
    for outcome in outcomes["demo"]:
        outcome.result()
    return load(folder)


def test_three_ranks_agree_as_well(tmp_path: Path) -> None:
    """Division by 3 is inexact, so another order of sums or another mean would change the bits."""
    results = on_ranks(Settings(steps=6, ranks=3, batch_size=2), tmp_path)
    assert [one.rank for one in results] == [0, 1, 2]
    assert [run.exact for run in results[0].runs] == [True, True, False]
    for one in results:
        hook, twin, sharded = one.runs
        assert twin.from_first.same_bits
        assert twin.losses == hook.losses
        assert all(run.from_rank_zero.same_bits for run in one.runs)
        # A sum of three terms in another order has other bits, but almost the same loss.
        assert not sharded.from_first.same_bits
        assert 0 < loss_difference(sharded, hook) < 1e-4
        assert abs(sharded.state_bytes - 8 * one.numel / 3) <= 2000
    assert len({tuple(one.runs[0].losses) for one in results}) == 3  # each rank had its own data


def test_local_sgd_sends_less_and_ends_near(tmp_path: Path) -> None:
    results = on_ranks(Settings(steps=12, ranks=2, batch_size=2, front_end="local-sgd"), tmp_path)
    for one in results:
        whole, often, seldom = one.runs
        assert whole.losses[:WARMUP] == seldom.losses[:WARMUP]  # at first, gradients of all ranks
        assert whole.losses[WARMUP + 1] != seldom.losses[WARMUP + 1]
        assert all(run.from_rank_zero.same_bits for run in one.runs)
        # Of 12 steps, 4 reduce gradients. Then steps 4 and 8, or only 4, average parameters.
        assert often.sent_bytes / whole.sent_bytes == pytest.approx(6 / 12, rel=0.01)
        assert seldom.sent_bytes / whole.sent_bytes == pytest.approx(5 / 12, rel=0.01)
    wrong = [sentence for sentence in judge(results) if "it must fall below" not in sentence]
    assert wrong == []
