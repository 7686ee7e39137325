"""Step hook on two ranks, equal bit for bit to DDP followed by torch.optim."""

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.choices import case
from tests.ranks import Job, run_ranks

from .cases import CASES, CLIPPED, IN_ORDER, run_cases
from .models import Branches

EQUAL = {**CASES, **IN_ORDER}
ALL = {**EQUAL, **CLIPPED}
SEVERAL = [name for name, one in ALL.items() if one.ddp["bucket_cap_mb"] < 1]
UNUSED = [name for name, one in ALL.items() if one.model is Branches and one.backwards == 1]


Seen = tuple[dict[str, Any], ...]
"""Observations of each rank in one iteration."""
Runs = dict[str, list[Seen]]
"""Iterations of each case, by name."""


@pytest.fixture(scope="module")
def runs() -> Runs:
    jobs = {f"{names[0]} ...": Job(run_cases, {"names": names}) for names in batched(ALL)}
    found: Runs = {}
    for outcomes in run_ranks(jobs, ranks=2, seconds=300).values():
        ranks = [outcome.result() for outcome in outcomes]
        for name in ranks[0]:
            found[name] = list(zip(*(rank[name] for rank in ranks), strict=True))
    return found


def batched(names: Collection[str], size: int = 12) -> list[list[str]]:
    """Divide the names of cases into batches that share a group."""
    listed = list(names)
    return [listed[at : at + size] for at in range(0, len(listed), size)]


def each(runs: Runs, names: Collection[str]) -> Iterator[tuple[str, int, Seen]]:
    """Yield each iteration of each case."""
    for name in names:
        for number, ranks in enumerate(runs[name]):
            yield name, number, ranks


def test_equal_to_the_twin(runs: Runs) -> None:
    for name, number, ranks in each(runs, EQUAL):
        for rank, seen in enumerate(ranks):
            with case(name=name, iteration=number, rank=rank):
                assert seen["differences"] == []
                assert seen["finite"]


def test_clipping_is_that_of_clip_grad_norm(runs: Runs) -> None:
    """torch adds the squares in another order, and in the precision of the parameters."""
    for name, number, ranks in each(runs, CLIPPED):
        clipped = CLIPPED[name]
        types = {param.dtype.itemsize for param in clipped.model().parameters()}
        for seen in ranks:
            with case(name=name, iteration=number):
                assert seen["norm"] > 2 * clipped.clip  # otherwise clipping changes nothing
                assert seen["apart"] < (1e-12 if types == {8} else 2e-6)
                assert seen["finite"]


def test_ranks_are_equal_on_different_data(runs: Runs) -> None:
    for name, number, ranks in each(runs, ALL):
        with case(name=name, iteration=number):
            assert len({seen["digest"] for seen in ranks}) == 1
            assert len({seen["loss"] for seen in ranks}) == len(ranks)


def test_no_iteration_is_skipped(runs: Runs) -> None:
    """Exactly the parameters whose count rises move, from the first iteration on."""
    before: dict[str, int] = {}
    for name, number, ranks in each(runs, ALL):
        before = before if number else {}
        for seen in ranks:
            with case(name=name, iteration=number):
                stepped = {n for n, steps in seen["steps"].items() if steps > before.get(n, 0)}
                assert set(seen["moved"]) == stepped - {"nothing"}  # a parameter without elements
                assert stepped
        before = ranks[0]["steps"]


def test_buckets_change_once(runs: Runs) -> None:
    """DDP changes its buckets once, after it has seen a backward pass.

    With ``find_unused_parameters``, the buckets never change.
    """
    for name in SEVERAL:
        buckets = [ranks[0]["buckets"] for ranks in runs[name]]
        changes = sum(one != other for one, other in pairwise(buckets))
        options = ALL[name].ddp
        finds = "find_unused_parameters" in options and "static_graph" not in options
        with case(name=name):
            assert changes == (0 if finds else 1)
            assert len(buckets[-1]) >= 2


def test_unused_parameters_keep_their_count(runs: Runs) -> None:
    """A parameter steps if any rank used it; one that no rank used keeps the count 0."""
    for name, number, ranks in each(runs, UNUSED):
        counts = {
            "stem": number + 1,
            "both": number + 1,
            "odd": (number + 1) // 2,
            "only_one": number + 1,
            "some": number // 3 + 1,
            "never": 0,
            "head": number + 1,
        }
        wanted = {
            f"{branch}.{kind}": n for branch, n in counts.items() for kind in ("weight", "bias")
        }
        for seen in ranks:
            with case(name=name, iteration=number):
                assert seen["steps"] == wanted
