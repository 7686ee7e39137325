"""Parameters bit for bit: beside one process of the pure core, and beside torch's own class."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs

POLICIES = ("greedy", "balanced", "contiguous", "elements", "sliced")
CUTS = ("greedy", "elements")
VIEWS = (False, True)
TRAINED = [
    *product(("adamw",), POLICIES, VIEWS, ("Tower",)),
    *product(("sgd", "adagrad", "lion", "clipped"), CUTS, VIEWS, ("Tower",)),
    *product(("adamw", "sgd"), CUTS, VIEWS, ("Pictures",)),
]
REPLICATED = [("adamw", "hierarchical", views, "Tower") for views in VIEWS]
MIXED = list(product(("adamw", "sgd"), CUTS, VIEWS))
TORCH = list(product(jobs.CLASSES, VIEWS, (False, True)))


def named(case: tuple[object, ...]) -> str:
    return " ".join(map(str, case))


def job(function: Callable[..., Any], names: str, case: tuple[object, ...]) -> Job:
    return Job(function, dict(zip(names.split(), case, strict=True)))


def launch(ranks: int) -> Outcomes:
    trained = [*TRAINED, *(REPLICATED if ranks == 4 else ())]
    every = {
        named(one): job(jobs.beside_core, "chain_name policy views kind", one) for one in trained
    }
    for one in MIXED:
        every[f"mixed {named(one)}"] = job(jobs.mixed, "chain_name policy views", one)
    for one in TORCH:
        every[f"torch {named(one)}"] = job(jobs.beside_torch, "name views groups", one)
    return run_ranks(every, ranks=ranks, seconds=60)


@pytest.fixture(scope="module", params=[1, 2, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    ranks: int = request.param
    return launch(ranks)


@pytest.mark.parametrize("case", [named(one) for one in (*TRAINED, *REPLICATED)])
def test_parameters_are_those_of_one_process(outcomes: Outcomes, case: str) -> None:
    if case not in outcomes:
        assert "hierarchical" in case and len(outcomes["mixed adamw greedy False"]) < 4
        return
    seen = [outcome.result() for outcome in outcomes[case]]
    if case.startswith("clipped elements"):
        # A norm whose parts were summed by rank is rounded otherwise, in double precision.
        assert all(one["far"] < 4.0 for one in seen)
    else:
        assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert all(one["changed"] for one in seen)
    assert len({one["digest"] for one in seen}) == 1
    assert all(one["grads"] == [] for one in seen)


@pytest.mark.parametrize("case", [f"mixed {named(one)}" for one in MIXED])
def test_mixed_dtypes(outcomes: Outcomes, case: str) -> None:
    seen = [outcome.result() for outcome in outcomes[case]]
    assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert len({one["digest"] for one in seen}) == 1


@pytest.mark.parametrize("case", [f"torch {named(one)}" for one in TORCH])
def test_beside_torch(outcomes: Outcomes, case: str) -> None:
    for outcome in outcomes[case]:
        seen = outcome.result()
        assert seen["wrong"] == []
        assert seen["partition"] and seen["groups"]
        assert seen["state"] == []
