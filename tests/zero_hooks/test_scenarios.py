"""Tests of runs in which ranks stop, wait, run out of data, or differ in speed."""

from collections.abc import Callable
from typing import Any

import pytest

from sharding.transport.local import LocalWorld
from tests.choices import case, pairs
from tests.ranks import Job, Outcomes, run_ranks

from . import scenarios
from .runs import KINDS

JITTER = [{"kind": "scatter", "memory": False}, {"kind": "scatter", "memory": True}]
UNEVEN = [
    {"kind": "scatter", "name": "tower", "memory": True},
    {"kind": "scatter", "name": "wide", "memory": False},
    {"kind": "scatter", "name": "tower", "memory": False, "late": True},
    {"kind": "scatter", "name": "prodigy", "memory": False},
]
SCALED = ("scatter",)
FREED = pairs(kind=KINDS, unused=(False, True), memory=(False, True))
FROZEN = ("scatter", "interleaved")
VIEWS = ("view", "averaged")


@pytest.fixture(scope="module")
def on_processes() -> Outcomes:
    jobs = {
        **{f"jitter {one}": Job(scenarios.jitter, one) for one in JITTER},
        **{f"uneven {one}": Job(scenarios.uneven, one) for one in UNEVEN},
        **{f"scaled {kind}": Job(scenarios.uneven_scaled, {"kind": kind}) for kind in SCALED},
        **{f"freed {one}": Job(scenarios.freed, one) for one in FREED},
        **{f"frozen {kind}": Job(scenarios.frozen_later, {"kind": kind}) for kind in FROZEN},
        **{f"{how}": Job(scenarios.views_in_training, {"how": how}) for how in VIEWS},
    }
    return run_ranks(jobs, ranks=3, seconds=90)


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


def on_threads(scenario: Callable[..., Any], ranks: int = 2, **given: Any) -> list[Any]:
    return LocalWorld(ranks).run(lambda group: scenario(group, **given))


def same_everywhere(ranks: list[Any]) -> None:
    for seen in ranks:
        assert not any(seen["differences"]), seen["differences"]
    assert len({seen["digest"] for seen in ranks}) == 1


# ------------------------------------------------------------------------------------- on threads


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_steps_by_what_is_not_finite(kind: str) -> None:
    for where in ("inf", "nan"):
        for seen in on_threads(scenarios.not_finite, kind=kind, where=where):
            with case(where=where):
                assert seen["moved"][1] == 0 and all(seen["moved"][:1] + seen["moved"][2:])
                assert seen["skipped"] == 1
                assert seen["differences"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_grad_scaler(kind: str) -> None:
    """An overflow on one rank skips the step of all ranks, and lowers the scale of all ranks."""
    for seen in on_threads(scenarios.scaled, kind=kind):
        assert seen["moved"][2] == 0 and all(seen["moved"][:2] + seen["moved"][3:])
        assert seen["scales"] == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        assert seen["skipped"] == 1
        assert seen["differences"] == []


def test_two_optimizers() -> None:
    same_everywhere(on_threads(scenarios.nested))


# ----------------------------------------------------------------------------------- on processes


def test_ranks_of_different_speed(on_processes: Outcomes) -> None:
    for one in JITTER:
        with case(**one):
            same_everywhere(results(on_processes, f"jitter {one}"))


def test_ranks_that_run_out_of_data(on_processes: Outcomes) -> None:
    """All gathers are complete when a join ends, because the caller may read parameters then."""
    for one in UNEVEN:
        with case(**one):
            ranks = results(on_processes, f"uneven {one}")
            same_everywhere(ranks)
            assert [seen["moved later"] for seen in ranks] == [[]] * 3


def test_ranks_that_run_out_of_data_have_the_scale_of_the_others(on_processes: Outcomes) -> None:
    """Ranks without data follow the scale of the others, since they step scaled gradients."""
    for kind in SCALED:
        with case(kind=kind):
            ranks = results(on_processes, f"scaled {kind}")
            same_everywhere(ranks)
            assert [seen["scale"] for seen in ranks] == [4.0 * 2.0**6] * 3


def test_a_hook_does_not_keep_its_module_alive(on_processes: Outcomes) -> None:
    """A hook does not keep its module alive, though DDP references the hook from C++.

    Python's garbage collector cannot find such a reference cycle.
    """
    for one in FREED:
        with case(**one):
            assert results(on_processes, f"freed {one}") == [[]] * 3


@pytest.mark.parametrize("job", [*(f"frozen {kind}" for kind in FROZEN), *VIEWS])
def test_ranks_have_equal_parameters(on_processes: Outcomes, job: str) -> None:
    """Backward may read a frozen weight after its bucket is ready; views change no parameter."""
    same_everywhere(results(on_processes, job))
