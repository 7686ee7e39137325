"""Test of the recommender example, run for a few steps."""

import os
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from functional_optim import DistributedOptimizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "recommender.py"


def test_it_trains_with_the_numbers_of_threads_and_draws(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))  # the example sets these variables
    example = runpy.run_path(str(EXAMPLE))
    quiet = Console(quiet=True)
    found = example["train"](4, DistributedOptimizer.over_threads, quiet)
    results = []

    def kept(*args: object) -> object:
        results.append(example["train"](*args))
        return results[0]

    main, picture = example["main"], tmp_path / "runs" / "recommender.png"
    monkeypatch.setitem(main.callback.__globals__, "train", kept)
    finished = CliRunner().invoke(main, ["--steps=4", f"--picture={picture}"])
    assert finished.exit_code == 0, finished.output
    assert "ranked right" in finished.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    for name in ("losses", "areas", "best"):
        assert getattr(results[0], name) == getattr(found, name)
