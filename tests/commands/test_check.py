"""Tests of ``functional-optim check``, which checks laws of a user's optimizer."""

import json
import sys
from pathlib import Path

import pytest

from functional_optim.testing import LAWS
from tests.choices import case

from .support import failed, run, shown

QUICK = ("--examples", 3)


def test_a_broken_law_is_shown_with_its_smallest_example_and_exits_with_1(own: Path) -> None:
    laws = ("--law", "pure", "--law", "same as the oracle", "--law", "in place")
    arguments = ("--oracle", "own:oracle", "--ulps", 4, *QUICK)
    finished = run("check", "own:coupled", *arguments, *laws)
    assert finished.exit_code == 1, finished.output
    assert "the law 'same as the oracle' is broken" in finished.stdout
    assert "smallest example:" in finished.stdout
    assert "param a: 1.0  (shape (), contiguous)\nstep 1:  a: 0.0" in finished.stdout
    assert "own:coupled: 1 of 3 laws hold, 1 not checked" in finished.stdout
    assert "[1/3] pure ... holds" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_laws_that_hold_exit_with_0(own: Path) -> None:
    for factory in ("own:coupled", "own:made", "own:divided", "adamw", "torch.optim:AdamW"):
        with case(factory=factory):
            text = shown("check", factory, "--law", "pure", "--matrices", *QUICK)
            assert f"{factory}: all 1 laws hold" in text


def test_usual_laws_are_those_that_concern_the_optimizer(own: Path) -> None:
    names = []
    result = run("check", "own:divided", "--examples", 1, "--matrices", "--dtype", "float64")
    assert result.exit_code == 0, result.output
    names = [line.split("] ")[1].split(" ...")[0] for line in result.stderr.splitlines()]
    usual = [name for name, law in LAWS.items() if not law.slow]
    assert set(names) < set(usual)
    assert "bound is reference" not in names
    assert "same as the oracle" not in names


def test_json_has_every_outcome(own: Path) -> None:
    arguments = ("--oracle", "own:oracle", *QUICK, "--law", "same as the oracle", "--law", "pure")
    result = run("check", "own:coupled", *arguments, "--json", "--keep-going")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["optimizer"] == "own:coupled"
    assert not content["holds"]
    broken, holds = content["laws"]
    assert (broken["law"], broken["result"]) == ("same as the oracle", "broken")
    assert "step 1:" in broken["example"]
    assert (holds["law"], holds["result"], holds["example"]) == ("pure", "holds", None)


def test_options_are_handed_to_the_factory_and_the_oracle(own: Path) -> None:
    """If an option occurs twice, both values are tried."""
    arguments = ("--law", "same as the oracle", "--oracle", "torch.optim:SGD", *QUICK)
    options = ("--option", "lr=0.5", "--option", "lr=0.25", "--option", "momentum=0.9")
    assert "all 1 laws hold" in shown("check", "sgd", *arguments, *options)
    text = failed(1, "check", "own:coupled", *arguments, "--option", "lr=0.25")
    assert "options: {'lr': 0.25}" in text


def test_an_optimizer_that_refuses_what_is_tried_exits_with_1() -> None:
    text = failed(1, "check", "muon", "--law", "pure", *QUICK)
    assert "the law 'pure' cannot be tried" in text
    assert "muon steps real matrices" in text


def test_wrong_arguments_exit_with_2(own: Path) -> None:
    for arguments, message in (
        (("nothing",), "must be package.module:name or one of adabelief, "),
        (("own:nothing",), "'own' has no 'nothing'"),
        (("no_such_module:make",), "No module named 'no_such_module'"),
        (("own:number",), "must return a functional_optim.Optimizer, such as adamw(lr=1e-3)"),
        (("own:broken",), "RuntimeError: no such luck"),
        (("own:OWN",), "'own' has no 'OWN'"),
        (("torch.optim:Optimizer",), "Optimizer has no functional counterpart"),
        (("own:made", "--option", "lr=1"), "is an Optimizer and takes no options, got lr"),
        (("adamw", "--option", "lr"), "must have the form key=value, such as lr=0.1, got 'lr'"),
        (("adamw", "--option", "speed=1"), "speed"),
        (("adamw", "--law", "purr"), "there is no law 'purr'; the laws are 'pure', "),
        (("adamw", "--oracle", "own:made"), "must be callable, it is Optimizer"),
        (("adamw", "--dtype", "int8"), "'int8' is not one of"),
        (("adamw", "--ulps", "-1"), "-1.0 is not in the range"),
    ):
        with case(arguments=arguments):
            assert message in failed(2, "check", *arguments)


def test_without_hypothesis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    text = failed(2, "check", "adamw")
    assert "check needs hypothesis, which is not installed; run: pip install" in text
