"""Tests of the output and errors of ``list``, ``explain``, ``plan --json`` and ``bench``."""

import json
from pathlib import Path

import pytest
import torch

import functional_optim
from functional_optim import TorchOptimizer, adamw, algorithms, muon
from functional_optim.commands import bench
from tests.choices import case

from .support import failed, model, run, shapes, shown


def test_every_algorithm_is_listed_with_its_state() -> None:
    rows = json.loads(shown("list", "--json", "--shape", "8,4"))
    assert [row["name"] for row in rows] == algorithms.__all__
    for row in rows:
        with case(name=row["name"]):
            optimizer = getattr(functional_optim, row["name"])()
            state = optimizer.init({"w": torch.zeros(8, 4)}).leaves["w"]
            tensors = functional_optim.core.state.state_tensors(state.stages)
            held = sum(one.nbytes for one in tensors)
            assert row["state_bytes_per_parameter"] * 32 - state.step.nbytes == held
            assert row["summary"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["adamw"]["torch_class"] == "torch.optim.AdamW"
    assert by_name["lion"]["torch_class"] is None
    table = shown("list").splitlines()
    assert len(table) == 1 + len(rows)
    assert next(line for line in table if line.startswith("adamw")).split()[1] == "8.000"


def test_a_shape_that_is_none_is_refused() -> None:
    for shape in ("many", "0,4", "4,", "-1"):
        with case(shape=shape):
            assert "must be whole numbers such as 1024,1024" in failed(2, "list", "--shape", shape)


def test_explain_says_what_a_step_would_do(own: Path) -> None:
    text = shown("explain", "adamw", "--shapes", shapes(own))
    optimizer = TorchOptimizer(model().parameters(), adamw())
    assert [line.strip() for line in text.splitlines()[1:2]] == optimizer.explain().splitlines()
    assert "23 parameters" in text
    assert "exp_avg_sq" in text
    content = json.loads(shown("explain", "own:divided", "--shapes", "own:model", "--json"))
    assert [part["parameters"] for part in content["parts"]] == [2, 2]
    assert repr(muon(lr=0.02)) == content["parts"][0]["chain"]
    assert {row["name"] for row in content["bytes"]} >= {"parameter", "momentum_buffer", "exp_avg"}


def test_explain_allocates_no_model(own: Path) -> None:
    (own / "huge.json").write_text("[[1048576, 1048576]]")
    text = shown("explain", "adamw", "--shapes", own / "huge.json")
    assert "1,099,511,627,776 elements" in text


def test_explain_refuses_what_it_cannot_read_or_step(own: Path) -> None:
    path = shapes(own)
    (own / "none.json").write_text("[]")
    for code, arguments, message in (
        (1, ("muon", "--shapes", path), "muon steps real matrices"),
        (2, ("adamw",), "Missing option '--shapes'"),
        (2, ("adamw", "--shapes", "nowhere.json"), "No such file"),
        (2, ("adamw", "--shapes", own / "none.json"), "has no parameters"),
        (2, ("own:number", "--shapes", path), "must return a functional_optim.Optimizer"),
        (
            2,
            ("sgd", "--shapes", path, "--option", "lr=1", "--option", "lr=2"),
            "lr is given 2 times",
        ),
        (2, ("sgd", "--shapes", path, "--executor", "fast"), "'fast' is not one of"),
    ):
        with case(arguments=arguments):
            assert message in failed(code, "explain", *arguments)


def test_a_plan_as_json(own: Path) -> None:
    arguments = ("--model", shapes(own), "--world-size", 2, "--policy", "elements", "--json")
    result = run("plan", *arguments, "--save", own / "plan.json")
    content = json.loads(result.stdout)
    assert [row["rank"] for row in content["ranks_of_one_replica"]] == [0, 1]
    assert sum(row["elements"] for row in content["ranks_of_one_replica"]) == 23
    assert content["digest"] in json.dumps(content)
    assert "the plan: " in result.stderr


def test_bench_outside_of_a_checkout_says_that_it_needs_one(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.functional_optim, "__file__", str(own / "site" / "__init__.py"))
    (own / "benchmarks").mkdir()
    (own / "benchmarks" / "__main__.py").write_text("")  # of another project
    text = failed(2, "bench", "--quick")
    assert "bench needs a checkout of the functional-optim repository" in text
    assert "Clone the repository" in text


def test_bench_hands_on_its_arguments_and_its_exit_code(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project = own / "checkout"
    (project / "benchmarks").mkdir(parents=True)
    (project / "inside").mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "functional-optim"\n')
    (project / "benchmarks" / "__main__.py").write_text(
        "import os, sys\nprint(os.getcwd(), sys.argv[1:])\nsys.exit(5)\n"
    )
    monkeypatch.chdir(project / "inside")
    assert run("bench", "--quick", "--section", "memory").exit_code == 5
    assert capfd.readouterr().out == f"{project} ['--quick', '--section', 'memory']\n"
