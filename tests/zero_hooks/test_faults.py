"""Nothing silent: what is wrong ends in an error that says what, on time, on every rank."""

import re
from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import faults
from .runs import INNER_KINDS

HOOKS = ("scatter", *INNER_KINDS)
INNER = [(kind, name) for kind in INNER_KINDS for name in faults.INNER]
THAWED = [(kind, when) for kind in HOOKS for when in ("before the hook", "after the hook")]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    jobs = {
        "refused": Job(faults.refused),
        "deterministic": Job(faults.deterministic),
        **{
            f"two modules {kind}": Job(faults.one_hook_on_two_modules, {"kind": kind})
            for kind in HOOKS
        },
        **{
            f"thawed {kind} {when}": Job(faults.thawed, {"kind": kind, "when": when})
            for kind, when in THAWED
        },
        **{
            f"frozen {kind}": Job(faults.frozen_at_run_time, {"kind": kind})
            for kind in ("scatter", "forward")
        },
        **{f"added {kind}": Job(faults.added_later, {"kind": kind}) for kind in INNER_KINDS},
        "added strange": Job(faults.added_strange),
        "skipped": Job(faults.skipped_by_ddp),
        "sparse": Job(faults.sparse),
        **{
            f"version {kind}": Job(faults.version_counters, {"kind": kind})
            for kind in ("scatter", "interleaved")
        },
        **{
            f"{kind} {name}": Job(faults.inner_hook, {"kind": kind, "name": name}, 10)
            for kind, name in INNER
        },
        **{
            f"absent {kind}": Job(faults.one_is_absent, {"kind": kind, "absent": 1}, 2)
            for kind in HOOKS
        },
    }
    return run_ranks(jobs, ranks=2, seconds=60)


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


REFUSED = {
    "no overlap": ("ValueError", "zero must be made with overlap_with_ddp=True"),
    "no DDP": ("TypeError", "ddp must be the DistributedDataParallel module .* got Tower"),
    "torch.optim": ("TypeError", "zero must be a sharding.ZeroRedundancyOptimizer, got torch"),
    "another module": ("ValueError", "ddp does not reduce 'layers.0.weight' and 11 more"),
    "other ranks": ("ValueError", r"reduces over ranks \[0, 1\] and zero shards over ranks \[.\]"),
    "max_norm": ("ValueError", "max_norm must be a number >= 0, or None, got -1.0"),
    "nan": ("ValueError", "max_norm must be a number >= 0, or None, got nan"),
}
ONE = {
    "scatter: half": ("ValueError", "zero does not have 'layers.1.bias' and 8 more"),
    "held: no hook": ("TypeError", "hook must be a DDP communication hook, got NoneType"),
}
ALL = {f"{kind}: {what}": wanted for kind in HOOKS for what, wanted in REFUSED.items()} | ONE


@pytest.mark.parametrize("what", ALL)
def test_refused(outcomes: Outcomes, what: str) -> None:
    wanted, pattern = ALL[what]
    for seen in results(outcomes, "refused"):
        assert seen.keys() == ALL.keys()
        assert seen[what], "it was taken"
        kind, text = seen[what]
        assert kind == wanted
        assert re.search(pattern, text), text


def test_gloo_is_deterministic(outcomes: Outcomes) -> None:
    assert results(outcomes, "deterministic") == [[], []]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_parameter_that_comes_twice(outcomes: Outcomes, kind: str) -> None:
    for seen in results(outcomes, f"two modules {kind}"):
        assert seen["raised"], "no error"
        error, text = seen["raised"]
        assert error == "RuntimeError"
        assert any(repr(name) in text for name in seen["names"]), text


@pytest.mark.parametrize(("kind", "when"), THAWED)
def test_a_parameter_that_never_comes(outcomes: Outcomes, kind: str, when: str) -> None:
    for seen in results(outcomes, f"thawed {kind} {when}"):
        assert seen, "no error"
        assert seen[0] == "RuntimeError"
        assert "'layers.1.weight'" in seen[1]


@pytest.mark.parametrize("kind", ["scatter", "forward"])
def test_frozen_at_run_time(outcomes: Outcomes, kind: str) -> None:
    for seen in results(outcomes, f"frozen {kind}"):
        assert seen["differences"] == []


@pytest.mark.parametrize("kind", INNER_KINDS)
def test_a_group_that_is_added(outcomes: Outcomes, kind: str) -> None:
    ranks = results(outcomes, f"added {kind}")
    for seen in ranks:
        assert seen["moved"] == [[6, True], [12, True], [12, True]]
    assert len({seen["digest"] for seen in ranks}) == 1


def test_a_group_that_ddp_does_not_know(outcomes: Outcomes) -> None:
    for kind, text in results(outcomes, "added strange"):
        assert kind == "ValueError"
        assert "'stranger'" in text


def test_buckets_that_ddp_leaves_out_are_no_silent_loss(outcomes: Outcomes) -> None:
    """With ``skip_all_reduce_unused_params`` DDP calls no hook for buckets that nobody used."""
    for seen in results(outcomes, "skipped"):
        if seen["raised"]:
            assert "'never.weight'" in seen["raised"][1] or "'never.bias'" in seen["raised"][1]
        else:
            assert seen["moved"] == ["used.weight", "used.bias"]


def test_sparse(outcomes: Outcomes) -> None:
    for kind, text in results(outcomes, "sparse"):
        assert kind in ("ValueError", "RuntimeError")
        assert "'table.weight'" in text and "sparse" in text


@pytest.mark.parametrize("kind", ["scatter", "interleaved"])
def test_a_parameter_that_backward_still_needs(outcomes: Outcomes, kind: str) -> None:
    """autograd says so; it would compute with the value after the step."""
    for seen in results(outcomes, f"version {kind}"):
        assert seen, "it computed with a parameter that had been stepped"
        assert seen[0] == "RuntimeError"
        assert "modified by an inplace operation" in seen[1]


SAYS = {
    "too small": "the inner hook returned 3 elements for a bucket of 64 elements",
    "no tensor": "the inner hook returned str for a bucket of 64 elements",
    "fails later": "bucket 1 is lost",
    "fails at once": "bucket 1 is lost",
}


@pytest.mark.parametrize(("kind", "name"), INNER)
def test_an_inner_hook_that_breaks_its_promise(outcomes: Outcomes, kind: str, name: str) -> None:
    """What it raised comes out of backward.

    Where it raised before it returned a future, DDP is left with a reduction that has not ended,
    and refuses every forward pass from then on: nothing can be lost in silence.
    """
    for seen in results(outcomes, f"{kind} {name}"):
        error, text = seen.pop("first")
        assert error == ("OSError" if name == "fails at once" else "RuntimeError")
        assert SAYS[name] in text
        assert seen.keys() == ({"second", "third"} if name == "fails at once" else set())
        for error, text in seen.values():
            assert error == "RuntimeError"
            assert "Expected to have finished reduction in the prior iteration" in text


@pytest.mark.parametrize("kind", HOOKS)
def test_a_rank_that_does_not_come_is_named(outcomes: Outcomes, kind: str) -> None:
    """Within the timeout, which is 2 s here."""
    seen, _ = results(outcomes, f"absent {kind}")
    error, text = seen["raised"]
    assert error in ("RuntimeError", "TransportError")  # the latter where backward itself waits
    assert "group rank 1 (global rank 1)" in text
    assert "in vain" in text or "lost" in text
    assert seen["seconds"] < 8


DYING = [("scatter", "backward"), ("scatter", "step"), ("forward", "step"), ("interleaved", "step")]


@pytest.mark.parametrize(("kind", "where"), DYING)
def test_a_rank_that_dies_is_named(kind: str, where: str) -> None:
    """A launch each: the processes of a job in which one dies serve no other."""
    job = Job(faults.one_dies, {"kind": kind, "victim": 1, "where": where}, 5)
    outcomes = run_ranks({"dies": job}, ranks=2, seconds=40)["dies"]
    seen = outcomes[0].result()
    assert seen["raised"], "it went on"
    # A gather that forward waits for raises there, where autograd has not made it a RuntimeError.
    assert seen["raised"][0] in ("RuntimeError", "TransportError")
    assert "group rank 1 (global rank 1)" in seen["raised"][1], seen["raised"][1]
    assert seen["seconds"] < 20
