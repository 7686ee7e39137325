"""Tests that each file in ``examples/`` runs with small settings."""

import os
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from click.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"


TELL_LEFT_FROM_RIGHT = """
import numpy


class Task:
    \"\"\"An episode ends with the first action that is not the sign of what is seen.\"\"\"

    def reset(self, seed=None):
        if seed is not None:
            self._chance = numpy.random.default_rng(seed)
        self._steps = 0
        return self._look(), {}

    def step(self, action):
        wrong = action != (self._seen[0] > 0)
        self._steps += 1
        return self._look(), 25.0 * (not wrong), wrong, self._steps == 20, {}

    def _look(self):
        self._seen = numpy.sign(self._chance.normal(size=4)).astype(numpy.float32)
        return self._seen


def make(name, disable_env_checker):
    assert name == "CartPole-v1"
    return Task()
"""
"""Source of a replacement for gymnasium, which only one example needs."""


def with_gymnasium(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new processes import the replacement for gymnasium."""
    (folder / "gymnasium.py").write_text(TELL_LEFT_FROM_RIGHT)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), before])))


def said_by(name: str, tmp_path: Path, *arguments: str) -> str:
    """Run an example, which must succeed and draw a picture; return its output."""
    picture = tmp_path / "new" / "folder" / "curves.png"
    command = [sys.executable, str(EXAMPLES / name), *arguments, f"--output={picture}"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=900, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arning" not in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return done.stdout


def test_a_model_that_is_cut_over_a_server_learns(tmp_path: Path) -> None:
    said = said_by("parameter_server.py", tmp_path, "--steps=12", "--batch-size=8")
    assert "server made 12 steps of embedding.weight, decoder.weight, decoder.bias\n" in said
    assert "trainer made 12 steps of lstm.weight_ih_l0" in said
    begin, end = re.findall(r"validation loss (\S+) -> (\S+) nats", said)[0]
    assert float(end) < 0.9 * float(begin)


def test_asynchronous_trainers_learn_from_as_many_samples(tmp_path: Path) -> None:
    options = ("--batches=24", "--batch-size=4", "--trainers=3", "--max-staleness=3")
    said = said_by("asynchronous_trainers.py", tmp_path, *options)
    found = re.findall(r"synchronous: validation loss (\S+) -> (\S+) after (\d+) samples", said)
    assert len(found) == 2
    for begin, end, samples in found:
        assert float(end) < float(begin)
        assert samples == "96"
    assert re.search(r"│ steps +│ 24 ", said) and re.search(r"│ snapshots +│ 24 ", said)
    ages = re.findall(r"(\d+): (\d+)", re.findall(r"steps by staleness +│ (.*?) +│", said)[0])
    assert sum(int(steps) for _, steps in ages) == 24
    assert all(int(age) <= 3 for age, _ in ages)


def test_a_class_of_ones_own_is_stepped_in_three_ways_to_the_same_bits(tmp_path: Path) -> None:
    said = said_by("custom_class.py", tmp_path, "--steps=4", "--batch-size=2")
    assert said.count("has no functional equivalent") == 1
    assert len(set(re.findall(r"loss (\d\.\d+ -> \d\.\d+)", said))) == 1
    assert said.endswith("All runs agree in every bit.\n")


def test_an_agent_learns_from_what_observers_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gymnasium(tmp_path, monkeypatch)
    options = ("--steps=32", "--passes=5", "--rounds=40", "--lr=0.01")
    said = said_by("cartpole.py", tmp_path, *options)
    mean = re.findall(r"^solved: mean return (\S+) over the last 100 of", said, re.MULTILINE)
    assert 475 <= float(mean[0]) <= 500


def test_without_gymnasium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # makes an import fail
    done = CliRunner().invoke(run_path(str(EXAMPLES / "cartpole.py"))["main"])
    assert done.exit_code == 2
    assert "gymnasium, which is not installed; run: pip install" in " ".join(done.output.split())
