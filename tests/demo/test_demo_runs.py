"""The whole demo, as a user starts it, on two and on three processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hooks.demo.launch import LaunchError, launch
from hooks.demo.settings import Settings


def test_a_short_demo_succeeds(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "functional_optim", "demo"),
            *("--steps", "6", "--batch-size", "8", "--output", str(picture)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = finished.stdout
    assert finished.returncode == 0, said + finished.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"6 of 6: validation loss A \d\.\d+, B \d\.\d+", said)
    for title in ("validation A", "validation B", "parameters", "gradients", "optimizer state"):
        assert title in said
    assert "between A and B, on any rank: 0\n" in said
    assert "agree in every bit, on every rank" in said
    assert "Warning" not in finished.stderr


def test_three_ranks_agree_as_well() -> None:
    """Dividing by 3 is not exact: here an order of sums or a mean of another kind would show."""
    results = launch(Settings(steps=6, ranks=3, batch_size=4))
    assert [one.rank for one in results] == [0, 1, 2]
    assert all(one.difference.same_bits for one in results)
    assert all(one.hook.from_rank_zero.same_bits for one in results)
    assert len({tuple(one.hook.losses) for one in results}) == 3  # each rank had its own data


def test_a_rank_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="results of 0 of 1 ranks"):
        launch(Settings(steps=6, ranks=1, front_end="not there"))
    assert "KeyError: 'not there'" in capfd.readouterr().err


def test_a_folder_called_hooks_does_not_hide_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in search if p))
    monkeypatch.chdir(tmp_path)
    (result,) = launch(Settings(steps=6, ranks=1, batch_size=1))
    assert result.difference.same_bits
