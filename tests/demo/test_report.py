"""Tests of the tables and the picture."""

import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hooks.demo import report
from hooks.demo.result import Difference, RankResult, WorkerResult


def printed(ranks: list[RankResult]) -> str:
    console = Console(width=80, record=True, quiet=False)
    with console.capture() as captured:
        report.show(console, ranks)
    return captured.get()


def test_losses_are_the_mean_over_ranks(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    plant(1, "A", losses=[5.5, 5.0, 4.5, 4.0])
    assert report.mean_losses(report.same_run(ranks, 0)) == [5.0, 4.5, 4.0, 3.5]
    assert report.mean_losses(report.same_run(ranks, 2)) == [4.5, 4.0, 3.5, 3.0]


def test_everything_measured_is_shown(ranks: list[RankResult], plant: Callable[..., None]) -> None:
    plant(1, "C", state_bytes=3 * 2**19)
    shown = printed(ranks)
    for expected in ("4.6000", "3.8000", "2.9000", "4.2500", "3.2500"):
        assert shown.count(expected) == 3, expected  # once in each run
    for expected in ("step-hook", "torch.optim.AdamW", "ZeRO", "1.00", "1.50", "2.00", "262,144"):
        assert expected in shown
    for unbroken in ("valid. C", "optimizer state", "400.00 (all runs)"):
        assert unbroken in shown
    assert "in shares of A's: B 1.000, C 0.750\n" in shown
    assert "in a step of A: 1.00 MiB; in shares of it: B 1.000, C 0.250\n" in shown
    assert "The [bold] text" in shown
    assert "another order" not in shown


def test_the_largest_difference_of_any_rank_is_shown(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    plant(1, "A", from_rank_zero=Difference(False, 7.5))
    for name, largest in (("B", 0.125), ("C", float("nan"))):
        plant(1, name, from_first=Difference(False, largest), losses=[4.5, 4.25, 3.5, 3.0])
        assert re.search(rf"A and {name} +│ +0.25 │ +{largest} │", printed(ranks))
    assert re.search(r"ranks, in A +│ +│ +7.5 │", printed(ranks))


def test_it_is_said_why_a_run_need_not_have_the_same_bits(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    plant(None, "C", exact=False, differs="adds in another order")
    assert "C adds in another order.\n" in printed(ranks)


def test_what_workers_hold_is_shown_in_place_of_shares(
    ranks: list[RankResult], plant: Callable[..., None]
) -> None:
    worker = WorkerResult("worker1", 2**19, 2**20, 7, 3 * 2**20, 5 * 2**20)
    plant(None, "B", workers=[worker])
    shown = printed(ranks[:1])
    assert re.search(r"B +│ worker1 +│ +7 │ +0.50 │ +1.00 │ +3.00 │ +5.00 │", shown)
    assert "in shares of" not in shown and "ranks, in A" not in shown


def test_the_picture_is_written(ranks: list[RankResult], tmp_path: Path) -> None:
    for suffix in ("png", "svg", "pdf"):
        path = tmp_path / f"curves.{suffix}"
        report.draw(ranks, path)
        assert path.stat().st_size > 5_000
