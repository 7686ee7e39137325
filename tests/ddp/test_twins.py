"""Bit for bit what DDP followed by torch.optim gives, after every iteration from the first on."""

from itertools import pairwise
from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from .cases import CASES, CLIPPED, run_case
from .models import Branches

ALL = {**CASES, **CLIPPED}
SEVERAL = [name for name, case in ALL.items() if case.ddp["bucket_cap_mb"] < 1]
UNUSED = [name for name, case in ALL.items() if case.model is Branches and case.backwards == 1]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    jobs = {name: Job(run_case, {"name": name}) for name in ALL}
    return run_ranks(jobs, ranks=2, seconds=60)


def iterations(outcomes: Outcomes, name: str) -> list[list[dict[str, Any]]]:
    """What was seen in each iteration, on each rank."""
    return list(zip(*(outcome.result() for outcome in outcomes[name]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_twin(outcomes: Outcomes, name: str) -> None:
    for number, ranks in enumerate(iterations(outcomes, name)):
        for rank, seen in enumerate(ranks):
            assert seen["differences"] == [], f"iteration {number}, rank {rank}"
            assert seen["finite"]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_is_that_of_clip_grad_norm(outcomes: Outcomes, name: str) -> None:
    """torch adds the squares up in another order, and in the precision of the parameters."""
    case = CLIPPED[name]
    types = {param.dtype.itemsize for param in case.model().parameters()}
    bound = 1e-12 if types == {8} else 2e-6
    for ranks in iterations(outcomes, name):
        for seen in ranks:
            assert seen["norm"] > 2 * case.clip  # otherwise nothing is clipped
            assert seen["apart"] < bound
            assert seen["finite"]


@pytest.mark.parametrize("name", ALL)
def test_ranks_are_equal_on_different_data(outcomes: Outcomes, name: str) -> None:
    for ranks in iterations(outcomes, name):
        assert len({seen["digest"] for seen in ranks}) == 1
        assert len({seen["loss"] for seen in ranks}) == len(ranks)


@pytest.mark.parametrize("name", ALL)
def test_no_iteration_is_skipped(outcomes: Outcomes, name: str) -> None:
    """Every parameter whose count rises moves, from the first iteration on; no other does."""
    before: dict[str, int] = {}
    for ranks in iterations(outcomes, name):
        for seen in ranks:
            stepped = {n for n, steps in seen["steps"].items() if steps > before.get(n, 0)}
            assert set(seen["moved"]) == stepped - {"nothing"}  # a parameter without elements
            assert stepped
        before = ranks[0]["steps"]


@pytest.mark.parametrize("name", ALL)
def test_one_call_per_bucket(outcomes: Outcomes, name: str) -> None:
    """Not one per parameter; and one for all, with the last bucket, where all must be there."""
    clips = name in CLIPPED
    before: dict[str, int] = {}
    for ranks in iterations(outcomes, name):
        for seen in ranks:
            assert len(seen["calls"]) == (1 if clips else len(seen["buckets"]))
            assert sum(seen["calls"]) == sum(seen["steps"].values()) - sum(before.values())
        before = ranks[0]["steps"]


@pytest.mark.parametrize("name", SEVERAL)
def test_buckets_change_once(outcomes: Outcomes, name: str) -> None:
    """One bucket (of each dtype) at first, more once DDP has seen a backward pass; with
    ``find_unused_parameters`` the same all along."""
    buckets = [ranks[0]["buckets"] for ranks in iterations(outcomes, name)]
    changes = sum(one != other for one, other in pairwise(buckets))
    options = ALL[name].ddp
    finds = "find_unused_parameters" in options and "static_graph" not in options
    assert changes == (0 if finds else 1)
    assert len(buckets[-1]) >= 2


@pytest.mark.parametrize("name", UNUSED)
def test_unused_parameters_keep_their_count(outcomes: Outcomes, name: str) -> None:
    """Stepped if any rank used them, else left alone: count 0 for those never used."""
    for number, ranks in enumerate(iterations(outcomes, name)):
        wanted = {
            "stem": number + 1,
            "both": number + 1,
            "odd": (number + 1) // 2,
            "only_one": number + 1,
            "some": number // 3 + 1,
            "never": 0,
            "head": number + 1,
        }
        for seen in ranks:
            assert seen["steps"] == {
                f"{branch}.{kind}": count
                for branch, count in wanted.items()
                for kind in ("weight", "bias")
            }
