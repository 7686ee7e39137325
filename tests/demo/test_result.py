"""Tests of the verdict: good results pass, and each planted fault is named."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hooks.demo.result import Difference, RankResult, WorkerResult, judge, load
from hooks.demo.run import compare
from tests.choices import case


def test_good_results_have_nothing_wrong(ranks: list[RankResult]) -> None:
    assert judge(ranks) == []


def test_results_survive_the_way_from_the_ranks(
    ranks: list[RankResult], plant: Callable[..., None], tmp_path: Path
) -> None:
    plant(1, "B", workers=[WorkerResult("worker1", 1, 2, 3, 4, 5)])
    for one in reversed(ranks):
        one.save(tmp_path)
    assert load(tmp_path) == ranks


NAN, INF = math.nan, math.inf
DIFFERING: list[tuple[int, str, dict[str, Any], str]] = [
    (0, "B", {"from_first": Difference(False, 1.5e-8)}, "parameters of runs A and B .* 1.5e-08"),
    (1, "C", {"from_first": Difference(False, 1.5e-8)}, "parameters of runs A and C .* 1.5e-08"),
    (1, "C", {"losses": [4.5, 4.0, 3.25, 3.0]}, "losses of runs A and C differ, by up to 0.25;"),
    (1, "C", {"losses": [4.5, 4.0, NAN, 3.0]}, "losses of runs A and C differ, by up to nan;"),
    (0, "B", {"validation": [(0, 4.6), (2, 3.3), (4, 2.9)]}, "runs A and B differ, by up to 0.5;"),
]


@pytest.mark.parametrize(("rank", "name", "changes", "told"), DIFFERING)
def test_runs_that_differ_are_wrong(
    ranks: list[RankResult],
    plant: Callable[..., None],
    rank: int,
    name: str,
    changes: dict[str, Any],
    told: str,
) -> None:
    plant(rank, name, **changes)
    (wrong,) = judge(ranks)
    assert re.search(f"rank {rank}: the .*{told}", wrong)


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_ranks_that_differ_are_wrong(
    ranks: list[RankResult], plant: Callable[..., None], name: str
) -> None:
    plant(1, name, from_rank_zero=Difference(False, 0.25))
    (wrong,) = judge(ranks)
    assert f"run {name}: " in wrong
    assert "rank 1 and rank 0" in wrong
    assert "0.25" in wrong


def test_a_loss_that_did_not_fall_clearly_is_wrong(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    for last in (4.6, 3.9, 9.0, NAN, INF):
        for name in "ABC":
            plant(None, name, validation=[(0, 4.6), (4, last)])
        fallen = [wrong for wrong in judge(ranks) if "the validation loss went" in wrong]
        with case(last=last):
            assert [wrong[:6] for wrong in fallen] == ["run A:", "run B:", "run C:"]
            assert all("3.680" in wrong for wrong in fallen)


def test_another_order_of_sums_may_lead_to_other_bits_but_not_to_another_loss(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    other = {"from_first": Difference(False, 0.5), "losses": [4.5, 4.1, 3.4, 3.2]}
    for last, faults in ((2.9, 0), (2.9028, 0), (2.8972, 0), (2.904, 2), (2.896, 2)):
        plant(None, "C", exact=False, validation=[(0, 4.6), (2, 3.9), (4, last)], **other)
        wrong = judge(ranks)
        with case(last=last):
            assert len(wrong) == faults
            assert all("losses of runs A and C are 2.9000 and" in one for one in wrong)


def test_a_loss_that_is_no_number_is_near_nothing(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    for last in (NAN, INF):
        plant(0, "C", exact=False, validation=[(0, 4.6), (2, 3.9), (4, last)])
        assert len(judge(ranks)) == 2  # the loss is not close, and has not fallen


def test_every_fault_is_told(ranks: list[RankResult], plant: Callable[..., None]) -> None:
    plant(None, "B", from_first=Difference(False, 1.0))
    plant(0, "C", from_first=Difference(False, 1.0), from_rank_zero=Difference(False, 1.0))
    assert len(judge(ranks)) == 4


def test_parameters_are_compared_bit_by_bit() -> None:
    zeros = torch.zeros(3)
    assert compare(zeros, zeros.clone()) == Difference(same_bits=True, largest=0.0)
    assert compare(zeros, -zeros) == Difference(same_bits=False, largest=0.0)
    assert compare(zeros, torch.tensor([0.0, -2.0, 1.0])) == Difference(False, 2.0)
