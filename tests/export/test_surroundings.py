"""Tests of the effects of an export beyond the step: files after a failure, and an example."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from functional_optim import adamw, sgd
from functional_optim.export import export_step

from .support import tree

ROOT = Path(__file__).parents[2]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, params = tmp_path / "step.pt2", tree()
    export_step(adamw(), params, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"step.pt2", "step.pt2.json"}

    def broken(program: object, made: Path, **_: object) -> None:
        made.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch.export, "save", broken)
    with pytest.raises(OSError, match="the disk is full"):
        export_step(sgd(), params, path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_package_is_replaced(tmp_path: Path) -> None:
    path, params = tmp_path / "step.pt2", {"w": torch.ones(2)}
    for lr in (0.5, 0.25):
        export_step(sgd(lr=lr), params, path)
    extra = {"manifest.json": ""}
    torch.export.load(path, extra_files=extra)
    assert '"lr": 0.25' in extra["manifest.json"]
    assert '"lr": 0.25' in (tmp_path / "step.pt2.json").read_text(encoding="utf-8")


def test_exporting_changes_no_parameter() -> None:
    params = dict(torch.nn.Linear(3, 2).named_parameters())
    before = {name: (param.detach().clone(), param._version) for name, param in params.items()}
    export_step(adamw(lr=0.1), params)
    for name, param in params.items():
        assert torch.equal(param, before[name][0])
        assert (param._version, param.grad) == (before[name][1], None)


def test_the_example_runs() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "export_step.py")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    last = finished.stdout.splitlines()[-1]
    assert last.startswith("step 60")
    assert float(last.rpartition(" ")[2]) < 0.01
