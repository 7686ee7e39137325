"""Stepping by ranges: what communication hooks build on."""

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs_ranges

CASES = [
    ("adamw", "greedy", False, 0, "Tower"),
    ("adamw", "elements", True, 0, "Tower"),
    ("adamw", "elements", False, 3, "Tower"),
    ("sgd", "greedy", True, 3, "Tower"),
    ("clipped", "greedy", True, 0, "Tower"),
    ("clipped", "elements", True, 2, "Tower"),
    ("lion", "elements", True, 0, "Pictures"),
    ("sgd", "greedy", False, 0, "Pictures"),
]
NAMES = ("chain_name", "policy", "views", "parts", "kind")


def launch(ranks: int) -> Outcomes:
    jobs = {
        str(case): Job(jobs_ranges.by_ranges, dict(zip(NAMES, case, strict=True))) for case in CASES
    }
    if ranks == 2:
        jobs["accounts"] = Job(jobs_ranges.accounts)
    return run_ranks(jobs, ranks=ranks, seconds=60)


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    ranks: int = request.param
    return launch(ranks)


@pytest.mark.parametrize("case", [str(case) for case in CASES])
def test_ranges_in_any_order_are_one_process(outcomes: Outcomes, case: str) -> None:
    seen = [outcome.result() for outcome in outcomes[case]]
    if "clipped', 'elements" in case:
        assert all(one["far"] < 4.0 for one in seen)
    else:
        assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert len({one["digest"] for one in seen}) == 1
    assert {one["step"] for one in seen} == {"nothing"}  # it only logs a warning


def test_account_of_an_iteration(outcomes: Outcomes) -> None:
    every = [outcome.result() for outcome in outcomes.get("accounts", [])]
    for rank, seen in enumerate(every):
        of_weight = [one for one in seen["owned"] if one[1] == "weight"]
        _, _, start, stop, _ = of_weight[0]
        assert seen["not owned"].startswith("ValueError: elements [")
        assert f"of that parameter it owns [{start}, {stop})" in seen["not owned"]
        assert "it owns nothing" in seen["unknown"]
        assert f"must have {stop - start} elements, got" in seen["length"] or stop - start == 1
        assert "torch.float64" in seen["dtype"]
        assert seen["no total"].startswith("ValueError: this chain needs no total")
        assert seen["end"].startswith("RuntimeError: there is no iteration to end")
        assert seen["skip"] == "ValueError: this plan has no parameter 'nothing'"
        assert seen["twice"].startswith(
            f"RuntimeError: elements [{start}, {stop}) of the parameter 'weight' were stepped"
        ), rank
        assert "never stepped in this iteration: 'weight'" in seen["missing"]
        assert "never stepped: 'weight'" in seen["begun"]
        assert "'weight' was declared unused" in seen["skipped"]
        assert seen["weight"] == [0.5] * 8
        assert seen["bias"] == [0.0] * 2
