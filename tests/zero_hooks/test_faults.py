"""Tests that every mistake ends in a clear error on every rank."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.ranks import Job, Outcomes, run_ranks

from . import faults
from .runs import INNER_KINDS

HOOKS = ("scatter", *INNER_KINDS)


def on_threads(function: Callable[..., Any], **given: Any) -> list[Any]:
    return LocalWorld(2).run(lambda group: function(group, **given))


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


def test_refused() -> None:
    for seen in on_threads(faults.refused):
        assert seen.pop("deterministic") == []  # sums are always in rank order
        assert seen.keys() == ALL.keys()
        for what, (wanted, pattern) in ALL.items():
            with case(what=what):
                assert seen[what], "it was taken"
                kind, text = seen[what]
                assert kind == wanted
                assert re.search(pattern, text), text


@pytest.mark.parametrize("kind", HOOKS)
def test_a_parameter_that_comes_twice(kind: str) -> None:
    for seen in on_threads(faults.one_hook_on_two_modules, kind=kind):
        assert seen["raised"], "no error"
        error, text = seen["raised"]
        assert error == "RuntimeError"
        assert any(repr(name) in text for name in seen["names"]), text


@pytest.mark.parametrize("when", ["before the hook", "after the hook"])
def test_a_parameter_that_never_comes(when: str) -> None:
    for kind in HOOKS:
        for seen in on_threads(faults.thawed, kind=kind, when=when):
            with case(kind=kind):
                assert seen, "no error"
                assert seen[0] == "RuntimeError"
                assert "'layers.1.weight'" in seen[1]


@pytest.mark.parametrize("kind", ["scatter", "interleaved"])
def test_frozen_at_run_time(kind: str) -> None:
    for seen in on_threads(faults.frozen_at_run_time, kind=kind):
        assert seen["differences"] == []


@pytest.mark.parametrize("kind", INNER_KINDS)
def test_a_group_that_is_added(kind: str) -> None:
    ranks = on_threads(faults.added_later, kind=kind)
    for seen in ranks:
        assert seen["moved"] == [[6, True], [12, True], [12, True]]
    assert len({seen["digest"] for seen in ranks}) == 1


def test_a_group_that_ddp_does_not_know() -> None:
    for kind, text in on_threads(faults.added_strange):
        assert kind == "ValueError"
        assert "'stranger'" in text


def test_buckets_that_ddp_leaves_out_are_no_silent_loss() -> None:
    """Buckets that DDP skips raise an error, or leave only unused parameters unchanged.

    With ``skip_all_reduce_unused_params`` DDP calls no hook for buckets that no rank used.
    """
    for seen in on_threads(faults.skipped_by_ddp):
        if seen["raised"]:
            assert "'never.weight'" in seen["raised"][1] or "'never.bias'" in seen["raised"][1]
        else:
            assert seen["moved"] == ["used.weight", "used.bias"]


def test_sparse() -> None:
    for kind, text in on_threads(faults.sparse):
        assert kind in ("ValueError", "RuntimeError")
        assert "'table.weight'" in text and "sparse" in text


@pytest.mark.parametrize("kind", ["scatter", "interleaved"])
def test_a_parameter_that_backward_still_needs(kind: str) -> None:
    """autograd raises an error instead of using the parameter's value after the step."""
    for seen in on_threads(faults.version_counters, kind=kind):
        assert seen, "it computed with a parameter that had been stepped"
        assert seen[0] == "RuntimeError"
        assert "modified by an inplace operation" in seen[1]


SAYS = {
    "too small": "the inner hook returned 3 elements for a bucket of 64 elements",
    "no tensor": "the inner hook returned str for a bucket of 64 elements",
    "fails later": "bucket 1 is lost",
    "fails at once": "bucket 1 is lost",
}


@pytest.mark.parametrize("name", faults.INNER)
def test_an_inner_hook_that_breaks_its_promise(name: str) -> None:
    """Backward raises an error that says what the inner hook did.

    If the inner hook raised an error before it returned a future, DDP has an unfinished reduction.
    So DDP refuses every later forward pass, and no gradient is lost silently.
    """
    for kind in INNER_KINDS:
        for seen in on_threads(faults.inner_hook, kind=kind, name=name):
            with case(kind=kind):
                error, text = seen.pop("first")
                assert error == ("OSError" if name == "fails at once" else "RuntimeError")
                assert SAYS[name] in text
                assert seen.keys() == ({"second", "third"} if name == "fails at once" else set())
                for error, text in seen.values():
                    assert error == "RuntimeError"
                    assert "Expected to have finished reduction in the prior iteration" in text


DYING = [("interleaved", "step")]
"""Hook, and moment of the death. tests/zero_hooks/test_resumed.py has the other hook."""


@pytest.fixture(scope="module")
def on_processes() -> Outcomes:
    found: Outcomes = {}
    for kind in ("scatter", "held"):
        job = Job(faults.one_is_absent, {"kind": kind, "absent": 1})
        found |= run_ranks({f"absent {kind}": job}, ranks=2, seconds=120)
    for kind, where in DYING:
        job = Job(faults.one_dies, {"kind": kind, "victim": 1, "where": where})
        found |= run_ranks({f"{kind} {where}": job}, ranks=2, seconds=120, fresh=True)
    return found


@pytest.mark.parametrize("kind", ["scatter", "held"])
def test_a_rank_that_does_not_come_is_named(on_processes: Outcomes, kind: str) -> None:
    """Ranks name an absent rank once the group's timeout has passed."""
    error, text = on_processes[f"absent {kind}"][0].result()
    assert error in ("RuntimeError", "TransportError")  # a TransportError if backward itself waits
    assert "group rank 1 (global rank 1)" in text
    assert "in vain" in text or "lost" in text


@pytest.mark.parametrize(("kind", "where"), DYING)
def test_a_rank_that_dies_is_named(on_processes: Outcomes, kind: str, where: str) -> None:
    survivor, victim = on_processes[f"{kind} {where}"]
    assert victim.error is not None
    seen = survivor.result()
    assert seen, "it went on"
    assert seen[0] in ("RuntimeError", "TransportError")
    assert "group rank 1 (global rank 1)" in seen[1], seen[1]
