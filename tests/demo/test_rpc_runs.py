"""Tests of ``functional-optim demo --front-end rpc``: a trainer, and workers with parameters."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from hooks.demo import command
from hooks.demo.launch import launch
from hooks.demo.result import RankResult, judge
from hooks.demo.settings import Settings


def test_parameters_on_two_workers_end_with_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results: list[RankResult] = []

    def kept(settings: Settings) -> list[RankResult]:
        results.extend(launch(settings))
        return results

    monkeypatch.setattr(command, "launch", kept)
    options = ["--frontend=rpc", "--steps=6", "--ranks=3", "--batch-size=2"]
    picture = tmp_path / "curves.png"
    finished = CliRunner().invoke(command.demo, [*options, f"--output={picture}"])
    by_ranks = capfd.readouterr()
    assert finished.exit_code == 0, finished.output + by_ranks.out + by_ranks.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "All runs agree in every bit; validation loss" in finished.output
    assert "worker2" in finished.output and "in two ways" in finished.output
    assert "arning" not in by_ranks.err
    (one,) = results
    assert judge(results) == []
    here, away = one.runs
    assert away.losses == here.losses and away.validation == here.validation
    assert away.losses[-1] < away.losses[0]
    assert away.from_first.same_bits and away.exact
    # Each worker has about half of the parameters, and the trainer has none.
    assert (away.parameter_bytes, away.state_bytes) == (0, 0)
    assert [part.steps for part in away.workers] == [6, 6]
    assert sum(part.parameter_bytes for part in away.workers) == 4 * one.numel
    assert all(
        part.parameter_bytes == pytest.approx(2 * one.numel, rel=0.1) for part in away.workers
    )
    assert sum(part.gradient_bytes for part in away.workers) == 6 * 4 * one.numel
