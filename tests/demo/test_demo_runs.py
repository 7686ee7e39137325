"""Tests of the whole demo, started as a user starts it."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hooks.demo import command
from hooks.demo.launch import LaunchError, launch
from hooks.demo.result import RankResult, judge
from hooks.demo.settings import Settings


def test_a_short_demo_succeeds_with_half_the_state_on_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results: list[RankResult] = []

    def kept(settings: Settings) -> list[RankResult]:
        results.extend(launch(settings))
        return results

    monkeypatch.setattr(command, "launch", kept)
    picture = tmp_path / "curves.png"
    options = ["--steps=6", "--batch-size=4", f"--output={picture}"]
    finished = CliRunner().invoke(command.demo, options)
    by_ranks = capfd.readouterr()
    said = by_ranks.out + finished.output
    assert finished.exit_code == 0, said + by_ranks.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"6 of 6: validation loss A (\d\.\d+), B \1, C \1\n", said)
    for title in ("train C", "valid. C", "parameters", "gradients", "optimizer state"):
        assert title in said
    for name in "BC":
        assert re.search(rf"A and {name} +│ +0 │ +0 │", said)
    for name in "ABC":
        assert re.search(rf"ranks, in {name} +│ +│ +0 │", said)
    assert re.search(r"in shares of A's: B 1\.000, C 0\.50\d\n", said)
    assert "All runs agree in every bit, on every rank" in said
    assert "arning" not in by_ranks.err
    assert_trained_in_half_the_state(results)


def assert_trained_in_half_the_state(results: list[RankResult]) -> None:
    assert judge(results) == []
    for one in results:
        hook, twin, sharded = one.runs
        assert sharded.exact
        assert sharded.losses == hook.losses == twin.losses
        assert sharded.validation == hook.validation == twin.validation
        assert sharded.from_first.same_bits and sharded.from_rank_zero.same_bits
        assert sharded.parameter_bytes == sharded.gradient_bytes == 4 * one.numel
        # AdamW has two averages of all elements. Each rank has half of them, up to 128 bytes of
        # alignment and the step counts.
        assert 8 * one.numel <= twin.state_bytes <= 8 * one.numel + 1000
        assert abs(sharded.state_bytes - 4 * one.numel) <= 2000
    # The ranks together have the whole state, and no element twice.
    both = sum(one.runs[2].state_bytes for one in results)
    assert 8 * results[0].numel <= both <= 8 * results[0].numel + 2000
    assert results[0].runs[2].losses != results[1].runs[2].losses  # each rank had its own data


def test_a_rank_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error comes from our own hooks, so a user's folder of this name does not hide them."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in search if p))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="results of 0 of 1 ranks"):
        launch(Settings(steps=6, ranks=1, front_end="not there"))
    said = capfd.readouterr().err
    assert "KeyError: 'not there'" in said and "the wrong package" not in said
