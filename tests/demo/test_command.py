"""Tests of ``functional-optim demo``: refused options, and its exit code for planted faults."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hooks.demo import command
from hooks.demo.launch import LaunchError
from hooks.demo.result import Difference, RankResult
from hooks.demo.settings import Settings
from tests.choices import case


def run(monkeypatch: pytest.MonkeyPatch, ranks: list[RankResult], *arguments: str) -> Result:
    """Run the command with these results instead of training."""
    monkeypatch.setattr(command, "launch", lambda settings: ranks)
    return CliRunner().invoke(command.demo, arguments)


def test_good_results_exit_with_0(
    monkeypatch: pytest.MonkeyPatch, ranks: list[RankResult], tmp_path: Path
) -> None:
    picture = tmp_path / "new" / "folder" / "curves.png"
    result = run(monkeypatch, ranks, "--output", str(picture))
    assert result.exit_code == 0, result.output
    assert "All runs agree in every bit" in result.output
    assert picture.exists()


def test_what_need_not_agree_in_every_bit_is_not_said_to(
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[RankResult],
    plant: Callable[..., None],
    tmp_path: Path,
) -> None:
    changed = {"validation": [(0, 4.6), (2, 3.8), (4, 2.901)], "exact": False}
    plant(None, "C", from_first=Difference(same_bits=False, largest=0.5), **changed)
    result = run(monkeypatch, ranks, "--output", str(tmp_path / "curves.png"))
    assert result.exit_code == 0, result.output
    assert "Runs A and B agree in every bit" in result.output
    assert "validation loss 4.600 -> 2.900, C's 2.901." in result.output


def test_where_only_the_first_is_exact_its_ranks_are_said_to_agree(
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[RankResult],
    plant: Callable[..., None],
    tmp_path: Path,
) -> None:
    for name in "BC":
        plant(None, name, exact=False, spread=0.1, validation=[(0, 4.6), (2, 3.8), (4, 3.1)])
    result = run(monkeypatch, ranks, "--output", str(tmp_path / "curves.png"))
    assert result.exit_code == 0, result.output
    assert "The ranks of each run agree in every bit, at the end" in result.output


def test_a_planted_difference_exits_with_1_and_still_draws(
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[RankResult],
    plant: Callable[..., None],
    tmp_path: Path,
) -> None:
    plant(1, "C", from_first=Difference(same_bits=False, largest=1e-7))
    picture = tmp_path / "curves.png"
    result = run(monkeypatch, ranks, "--output", str(picture))
    assert result.exit_code == 1
    assert "rank 1: the parameters of runs A and C differ, by up to 1e-07" in result.output
    assert "agree in every bit" not in result.output
    assert picture.exists()


def test_a_failed_rank_exits_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(settings: Settings) -> list[RankResult]:
        raise LaunchError("training ended early")

    monkeypatch.setattr(command, "launch", fail)
    result = CliRunner().invoke(command.demo, ["--output", str(tmp_path / "curves.png")])
    assert result.exit_code == 1
    assert "training ended early" in result.output


def test_bad_values_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value, expected in (
        ("--steps", "5", "5 is not in the range x>=6"),
        ("--steps", "many", "'many' is not a valid integer range"),
        ("--ranks", "0", "0 is not in the range 1<=x<=16"),
        ("--batch-size", "0", "0 is not in the range x>=1"),
        ("--seed", "-1", "-1 is not in the range"),
        ("--front-end", "magic", "'magic' is not one of 'step-hook', 'local-sgd', 'rpc'"),
        ("--output", "curves.txt", "must end in .pdf, .png, .svg, got 'curves.txt'"),
        ("--output", "curves", "must end in"),
        ("--output", "/dev/null/curves.png", "'/dev/null' cannot be made"),
    ):
        result = run(monkeypatch, [], option, value)
        with case(option=option, value=value):
            assert result.exit_code == 2
            assert expected in " ".join(result.output.split())


def test_parameters_elsewhere_need_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, [], "--frontend", "rpc", "--ranks", "1")
    assert result.exit_code == 2
    assert "at least 2, a trainer and a worker" in " ".join(result.output.split())


def test_help_states_the_criterion() -> None:
    result = CliRunner().invoke(command.demo, ["--help"])
    assert result.exit_code == 0
    assert "equal bit by bit" in " ".join(result.output.split())
