"""Nothing silent: what is wrong ends in an error that says what, on time, on every rank."""

import re
from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import faults
from .cases import ONE, UNUSED

INNER = [(name, measured) for name in faults.INNER for measured in (False, True)]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    jobs = {
        "two modules, one bucket": Job(faults.one_hook_on_two_modules, ONE),
        "two modules": Job(faults.one_hook_on_two_modules, UNUSED),
        "in no bucket": Job(faults.in_no_bucket),
        "thawed": Job(faults.thawed),
        "frozen": Job(faults.frozen_but_named),
        "skipped": Job(faults.skipped_by_ddp),
        "refused": Job(faults.refused),
        "ignored": Job(faults.ignored),
        **{
            f"{name} {measured}": Job(faults.inner_hook, {"name": name, "measured": measured}, 10)
            for name, measured in INNER
        },
        "one fails": Job(faults.one_fails, {"rank_that_fails": 1, "linger": 3.0}, 2),
        "one fails and leaves": Job(faults.one_fails, {"rank_that_fails": 0, "linger": 0.0}, 2),
    }
    return run_ranks(jobs, ranks=2, seconds=60)


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


# -- each parameter once ------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["two modules", "two modules, one bucket"])
def test_a_parameter_that_comes_twice(outcomes: Outcomes, job: str) -> None:
    for seen in results(outcomes, job):
        assert seen["raised"], f"no error, and {seen['steps']} steps in one iteration"
        kind, text = seen["raised"]
        assert kind == "RuntimeError"
        assert any(repr(name) in text for name in seen["names"])
        assert max(seen["steps"]) <= 1


@pytest.mark.parametrize(
    ("job", "name"), [("in no bucket", "stranger"), ("thawed", "layers.1.weight")]
)
def test_a_parameter_that_never_comes(outcomes: Outcomes, job: str, name: str) -> None:
    for kind, text in results(outcomes, job):
        assert kind == "RuntimeError"
        assert f"never stepped: {name!r}. " in text


def test_a_frozen_parameter_in_params_is_named(outcomes: Outcomes) -> None:
    for kind, text in results(outcomes, "frozen"):
        assert kind in ("ValueError", "RuntimeError")
        assert "'layers.1.weight'" in text


def test_buckets_that_ddp_leaves_out_are_no_silent_loss(outcomes: Outcomes) -> None:
    """With ``skip_all_reduce_unused_params`` DDP calls no hook for buckets that nobody used."""
    for seen in results(outcomes, "skipped"):
        if seen["raised"]:
            assert "'never.weight'" in seen["raised"][1] or "'never.bias'" in seen["raised"][1]
        else:
            counts = {"used.weight": 2, "used.bias": 2, "never.weight": 0, "never.bias": 0}
            assert seen["steps"] == counts


# -- inner hooks --------------------------------------------------------------------------------

SAYS = {
    "too small": "the inner hook returned 3 elements for a bucket of 64 elements",
    "no tensor": "the inner hook returned str for a bucket of 64 elements",
    "fails later": "OSError: bucket 1 is lost",
    "fails at once": "bucket 1 is lost",
}


@pytest.mark.parametrize(("name", "measured"), INNER)
def test_an_inner_hook_that_breaks_its_promise(
    outcomes: Outcomes, name: str, measured: bool
) -> None:
    for kind, text in results(outcomes, f"{name} {measured}"):
        assert kind == ("OSError" if name == "fails at once" else "RuntimeError")
        assert SAYS[name] in text


# -- what OptimizerState refuses ----------------------------------------------------------------

REFUSED = {
    "no DDP": ("TypeError", "takes the DistributedDataParallel module .* got Tower"),
    "no state": ("TypeError", "state must be the State"),
    "half a state": ("ValueError", "no state at 'layers.1.bias'"),
    "another shape": ("ValueError", "state at 'layers.0.bias' is of another tree"),
    "another optimizer": ("ValueError", "state at 'layers.0.bias' is of another optimizer"),
    "another option": ("ValueError", "momentum_buffer is missing"),
    "twice": ("ValueError", "'again' is also at 'layers.0.bias'"),
    "no params": ("ValueError", "no tensor"),
    "no tensor": ("TypeError", "the parameter at 'x' must be a tensor"),
    "executor": ("ValueError", "executor must be one of .* got 'fast'"),
    "unknown hyper": ("TypeError", "no hyper-parameter 'beta'"),
    "wrong hyper": ("ValueError", "lr must be .* got -1.0"),
    "hyper without state": ("ValueError", "momentum"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(outcomes: Outcomes, what: str) -> None:
    wanted, pattern = REFUSED[what]
    for seen in results(outcomes, "refused"):
        assert seen[what], "it was taken"
        kind, text = seen[what]
        assert kind == wanted
        assert re.search(pattern, text), text


def test_refused_is_complete(outcomes: Outcomes) -> None:
    for seen in results(outcomes, "refused"):
        assert seen.keys() == REFUSED.keys()


def test_an_ignored_parameter(outcomes: Outcomes) -> None:
    for seen in results(outcomes, "ignored"):
        kind, text = seen["all"]
        assert kind == "ValueError"
        assert "'layers.1.weight'" in text and "params=" in text
        assert seen["rest"] == []
        assert seen["left alone"]


# -- one rank in trouble ------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "failing"), [("one fails", 1), ("one fails and leaves", 0)])
def test_one_rank_that_fails_ends_the_other(outcomes: Outcomes, job: str, failing: int) -> None:
    """The other ends when its collectives time out (2 s) or find no one there, not later."""
    ranks = results(outcomes, job)
    assert ranks[failing]["raised"] == ["OSError", "the disk is full"]
    other = ranks[1 - failing]
    assert other["raised"][0] in ("RuntimeError", "DistBackendError")
    assert other["seconds"] < 20
