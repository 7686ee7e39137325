"""State dicts, groups that are added, uneven inputs, scalers and sub-groups, on real processes."""

import math
from itertools import product
from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs_more

STATES = list(
    product(("sgd", "damped", "adam", "adagrad"), (("greedy", False), ("elements", True)))
)
NORMS = {"2": 2.0, "1": 1.0, "inf": math.inf}
DISAGREE = ("shape", "name", "more", "policy", "frozen", "bad")
BOTH = {"greedy": False, "elements": True}


def launch(ranks: int) -> Outcomes:
    jobs: dict[str, Job] = {
        f"state dicts {name} {policy}": Job(
            jobs_more.state_dicts, {"name": name, "policy": policy, "views": views}
        )
        for name, (policy, views) in STATES
    }
    for policy, views in BOTH.items():
        jobs[f"added {policy}"] = Job(
            jobs_more.added, {"name": "adam", "policy": policy, "views": views}
        )
        jobs[f"foreign {policy}"] = Job(jobs_more.foreign, {"views": views})
        jobs[f"thawed {policy}"] = Job(
            jobs_more.thawed, {"name": "adam", "policy": policy, "views": views}
        )
        jobs[f"scheduled {policy}"] = Job(jobs_more.scheduled, {"views": views})
        jobs[f"uneven {policy}"] = Job(
            jobs_more.uneven, {"name": "adam", "policy": policy, "schedule": views}
        )
        jobs[f"scaled {policy}"] = Job(
            jobs_more.scaled, {"where": ranks - 1, "unscaled_first": views}
        )
    for name, order in NORMS.items():
        for policy in BOTH:
            jobs[f"clipped {name} {policy}"] = Job(
                jobs_more.clipped, {"policy": policy, "norm_type": order}
            )
    for what in DISAGREE:
        jobs[f"disagree {what}"] = Job(jobs_more.disagreeing, {"what": what})
    if ranks == 4:
        jobs["subgroup"] = Job(jobs_more.on_subgroup, {"name": "adam"})
        jobs["mesh"] = Job(jobs_more.on_mesh)
        for policy, views in BOTH.items():
            jobs[f"few {policy}"] = Job(jobs_more.few_params, {"policy": policy, "views": views})
    return run_ranks(jobs, ranks=ranks, seconds=60)


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    ranks: int = request.param
    return launch(ranks)


def results(outcomes: Outcomes, name: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[name]]


@pytest.mark.parametrize("case", [f"{name} {policy}" for name, (policy, _) in STATES])
def test_state_dicts_are_the_plain_optimizers(outcomes: Outcomes, case: str) -> None:
    seen = results(outcomes, f"state dicts {case}")
    for rank, one in enumerate(seen):
        assert one["refused"] and one["before"] == [] and one["after"] == []
        assert one["untouched"] == [] and one["lr"] == [0.5, 0.5]
        if rank == len(seen) - 1:
            assert one["same"] == [] and one["loaded"] == []
        else:
            assert one["elsewhere"]
    assert len({one["digest"] for one in seen}) == 1


@pytest.mark.parametrize("policy", BOTH)
def test_any_other_class(outcomes: Outcomes, policy: str) -> None:
    seen = results(outcomes, f"foreign {policy}")
    for one in seen:
        assert one["wrong"] == [] and one["losses"] == [7.0] * 3 and one["added"] == [4, 4]
        assert one["ranges"].startswith("RuntimeError: Halving has no functional equivalent")
        assert one["save"].startswith("RuntimeError: Halving has no functional equivalent")
    assert seen[0]["state"] == [] and seen[0]["again"] == []


@pytest.mark.parametrize("policy", BOTH)
def test_a_group_that_is_added(outcomes: Outcomes, policy: str) -> None:
    for one in results(outcomes, f"added {policy}"):
        assert one["wrong"] == [] and one["state"] == []
        assert one["kept"] and one["unchanged"] and one["groups"] == 2
        assert "lr must be" in one["refused"]


@pytest.mark.parametrize("policy", BOTH)
def test_trainability_may_change(outcomes: Outcomes, policy: str) -> None:
    seen = results(outcomes, f"thawed {policy}")
    assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert len({one["digest"] for one in seen}) == 1


@pytest.mark.parametrize("policy", BOTH)
def test_schedulers_and_accumulation(outcomes: Outcomes, policy: str) -> None:
    for one in results(outcomes, f"scheduled {policy}"):
        assert one["wrong"] == []
        assert len(set(one["rates"])) == 5


@pytest.mark.parametrize(("name", "policy"), list(product(NORMS, BOTH)))
def test_clipping(outcomes: Outcomes, name: str, policy: str) -> None:
    seen = results(outcomes, f"clipped {name} {policy}")
    for one in seen:
        ours, theirs = one["norm"]
        assert math.isclose(ours, theirs, rel_tol=1e-5)  # torch adds up in single precision
        assert one["errors"] < 1e-5
        assert math.isclose(one["low"], 0.3, rel_tol=1e-5)
        assert one["nan"] == "nan"
        assert one["raises"].startswith("RuntimeError: the norm of order")
        assert one["bad"].startswith("ValueError: norm_type must be")
    assert len({tuple(one["norm"]) for one in seen}) == 1


@pytest.mark.parametrize("policy", BOTH)
def test_a_step_is_skipped_on_all_ranks(outcomes: Outcomes, policy: str) -> None:
    seen = results(outcomes, f"scaled {policy}")
    assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert len({one["digest"] for one in seen}) == 1


@pytest.mark.parametrize("policy", BOTH)
def test_uneven_inputs(outcomes: Outcomes, policy: str) -> None:
    seen = results(outcomes, f"uneven {policy}")
    assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert len({one["digest"] for one in seen}) == 1


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("shape", "place 1, 'b', has shape (6,) on group rank"),
        ("name", "place 1, 'b', has path 'c' on group rank"),
        ("more", "'c', at place 2, is on group rank"),
        ("policy", "policy: 'greedy' -> 'elements'"),
        ("frozen", "'a', has requires_grad False on group rank"),
        ("bad", "could not make a plan: ValueError: policy must be one of"),
    ],
)
def test_ranks_that_disagree(outcomes: Outcomes, what: str, told: str) -> None:
    seen = results(outcomes, f"disagree {what}")
    assert [one.startswith("ValueError: ") for one in seen] == [True] * len(seen)
    assert all(told in one for one in seen[:-1])


def test_a_subgroup_whose_ranks_are_others(outcomes: Outcomes) -> None:
    if "subgroup" in outcomes:
        seen = results(outcomes, "subgroup")
        assert seen[0] is None and seen[2] is None
        for rank, one in enumerate((seen[1], seen[3])):
            assert one["ranks"] == [rank, (1, 3)[rank], 2]
            assert one["wrong"] == [] and one["state"] == []
            assert "0 to 1, got 3" in one["to"]


def test_a_mesh(outcomes: Outcomes) -> None:
    if "mesh" in outcomes:
        for one in results(outcomes, "mesh"):
            assert one["wrong"] == [] and one["size"] == 2
            assert "the mesh has 2" in one["refused"]


@pytest.mark.parametrize("policy", BOTH)
def test_more_ranks_than_parameters(outcomes: Outcomes, policy: str) -> None:
    if f"few {policy}" in outcomes:
        seen = results(outcomes, f"few {policy}")
        assert [one["wrong"] for one in seen] == [[]] * 4
        assert 0 in [one["owned"] for one in seen]
        assert all(len(one["groups"]) == 1 for one in seen)
