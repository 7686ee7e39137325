"""Tables and the picture."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hooks.demo import report
from hooks.demo.result import Difference, RankResult


def printed(ranks: list[RankResult]) -> str:
    console = Console(width=80, record=True, quiet=False)
    with console.capture() as captured:
        report.show(console, ranks)
    return captured.get()


def test_losses_are_the_mean_over_ranks(ranks: list[RankResult]) -> None:
    ranks[1] = replace(ranks[1], hook=replace(ranks[1].hook, losses=[5.5, 5.0, 4.5, 4.0]))
    hook_losses, torch_losses = report.mean_losses(ranks)
    assert hook_losses == [5.0, 4.5, 4.0, 3.5]
    assert torch_losses == [4.5, 4.0, 3.5, 3.0]


def test_everything_measured_is_shown(ranks: list[RankResult]) -> None:
    shown = printed(ranks)
    for expected in ("4.6000", "3.8000", "2.9000", "4.2500", "3.2500"):
        assert shown.count(expected) == 2, expected  # run A and run B
    for expected in ("step-hook", "torch.optim.AdamW", "1.00", "2.00", "400.00", "262,144"):
        assert expected in shown
    assert "The [bold] text" in shown


@pytest.mark.parametrize("largest", [0.125, float("nan")])
def test_the_largest_difference_of_any_rank_is_shown(
    ranks: list[RankResult], largest: float
) -> None:
    ranks[1] = replace(ranks[1], difference=Difference(False, largest))
    assert f"between A and B, on any rank: {largest}" in printed(ranks)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_is_written(ranks: list[RankResult], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"curves.{suffix}"
    report.draw(ranks, path)
    assert path.stat().st_size > 5_000
