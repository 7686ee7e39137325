"""The verdict: nothing wrong passes, and each planted fault is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hooks.demo.result import Difference, RankResult, judge, load
from hooks.demo.train import compare


def test_good_results_have_nothing_wrong(ranks: list[RankResult]) -> None:
    assert judge(ranks) == []


def test_results_survive_the_way_from_the_ranks(ranks: list[RankResult], tmp_path: Path) -> None:
    for one in reversed(ranks):
        one.save(tmp_path)
    assert load(tmp_path) == ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_runs_that_differ_are_wrong(ranks: list[RankResult], rank: int) -> None:
    ranks[rank] = replace(ranks[rank], difference=Difference(same_bits=False, largest=1.5e-8))
    (wrong,) = judge(ranks)
    assert f"rank {rank}" in wrong
    assert "1.5e-08" in wrong


@pytest.mark.parametrize(("field", "name"), [("hook", "run A"), ("torch", "run B")])
def test_ranks_that_differ_are_wrong(ranks: list[RankResult], field: str, name: str) -> None:
    run = replace(getattr(ranks[1], field), from_rank_zero=Difference(False, 0.25))
    ranks[1] = replace(ranks[1], **{field: run})
    (wrong,) = judge(ranks)
    assert name in wrong
    assert "rank 1 and rank 0" in wrong
    assert "0.25" in wrong


@pytest.mark.parametrize("last", [4.6, 3.9, 9.0, float("nan"), float("inf")])
def test_a_loss_that_did_not_fall_clearly_is_wrong(ranks: list[RankResult], last: float) -> None:
    run = replace(ranks[0].hook, validation=[(0, 4.6), (4, last)])
    ranks[0] = replace(ranks[0], hook=run)
    (wrong,) = judge(ranks)
    assert "validation loss" in wrong
    assert "3.680" in wrong


def test_every_fault_is_told(ranks: list[RankResult]) -> None:
    worse = [replace(one, difference=Difference(False, 1.0)) for one in ranks]
    assert len(judge(worse)) == 2


def test_parameters_are_compared_bit_by_bit() -> None:
    zeros = torch.zeros(3)
    assert compare(zeros, zeros.clone()) == Difference(same_bits=True, largest=0.0)
    assert compare(zeros, -zeros) == Difference(same_bits=False, largest=0.0)
    assert compare(zeros, torch.tensor([0.0, -2.0, 1.0])) == Difference(False, 2.0)
