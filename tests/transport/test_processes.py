"""Both operations on 2, 3 and 4 real processes, with other data on every rank."""

from itertools import product

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs

CASES = [
    (dtype, cut, average)
    for dtype, cut, average in product(jobs.DTYPES, jobs.CUTS, (False, True))
    if dtype == "float32" or cut == "backwards, with gaps"
]
NAMES = [f"{dtype}, {cut}{', mean' * average}" for dtype, cut, average in CASES]


def common() -> dict[str, Job]:
    return {
        **{
            name: Job(jobs.sums, {"dtype": dtype, "cut": cut, "average": average})
            for name, (dtype, cut, average) in zip(NAMES, CASES, strict=True)
        },
        "layouts": Job(jobs.layouts),
        "futures": Job(jobs.futures),
        "other dtypes": Job(jobs.other_dtypes),
        "any order": Job(jobs.any_order),
    }


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    ranks: int = request.param
    more = {
        2: {"beside ddp": Job(jobs.beside_ddp)},
        3: {},
        4: {
            "subgroup": Job(jobs.subgroup, {"ranks": [1, 3]}),
            "of one": Job(jobs.groups_of_one),
            "mesh": Job(jobs.mesh),
        },
    }[ranks]
    return run_ranks({**common(), **more}, ranks=ranks, seconds=60)


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_one_process(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes[name]:
        assert set(outcome.result().values()) == {True}, outcome.result()


@pytest.mark.parametrize("name", ["layouts", "other dtypes", "any order"])
def test_on_every_rank(outcomes: Outcomes, name: str) -> None:
    assert [outcome.result() for outcome in outcomes[name]] == [True] * len(outcomes[name])


def test_futures(outcomes: Outcomes) -> None:
    for outcome in outcomes["futures"]:
        seen = outcome.result()
        assert seen["right"] and seen["again"]
        assert seen["scratch"] <= 2  # in_flight, for nine operations


def test_mean_is_that_of_ddp(outcomes: Outcomes) -> None:
    if "beside ddp" in outcomes:
        assert [outcome.result() for outcome in outcomes["beside ddp"]] == [True, True]


def test_group_ranks_are_not_global_ranks(outcomes: Outcomes) -> None:
    if "subgroup" in outcomes:
        seen = [outcome.result() for outcome in outcomes["subgroup"]]
        assert seen[0] is None and seen[2] is None
        for rank, one in enumerate((seen[1], seen[3])):
            assert one == {
                "own": True,
                "rank": rank,
                "gathered": True,
                "twin": [True] * 4,
                "sum": 1.0,
            }


def test_groups_of_one_rank(outcomes: Outcomes) -> None:
    if "of one" in outcomes:
        assert [outcome.result() for outcome in outcomes["of one"]] == [[True, True]] * 4


def test_mesh(outcomes: Outcomes) -> None:
    if "mesh" in outcomes:
        assert [outcome.result() for outcome in outcomes["mesh"]] == [True] * 4
