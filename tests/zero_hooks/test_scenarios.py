"""Runs in which ranks stop, wait, fail to come, or differ; and more ranks."""

from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import scenarios
from .cases import run_case
from .runs import INNER_KINDS, KINDS

NAMES = (
    *("tower", "wide", "wide, cut", "unused", "all used", "max_norm", "clip in the chain"),
    *("learning rates", "two groups", "mixed dtypes"),
)
ON_FOUR = [
    f"{name}, {kind}"
    for name in NAMES
    for kind in KINDS
    if (name, kind) not in {("max_norm", other) for other in INNER_KINDS}
]
ON_FOUR += [f"tower, sliced, {kind}" for kind in KINDS]
IN_MEMORY = [name for name in ON_FOUR if name.endswith(("scatter", "forward", "held"))]
SUBGROUPS = (
    *("tower, scatter", "tower, held", "tower, interleaved"),
    *("wide, scatter", "wide, cut, forward", "unused, interleaved"),
)
BYTES = [(policy, cap) for policy in ("greedy", "elements", "balanced") for cap in (1e-4, 25)]
UNEVEN = [(kind, name) for kind in ("scatter", "forward") for name in ("tower", "bucket views")]
LATE = [(attention, how) for attention in (False, True) for how in ("wait", "state_dict", "load")]
BAD = [(kind, where) for kind in KINDS for where in ("inf", "nan")]


@pytest.fixture(scope="module")
def on_two() -> Outcomes:
    jobs = {
        **{f"scheduled {kind}": Job(scenarios.scheduled, {"kind": kind}) for kind in KINDS},
        **{
            f"{where} {kind}": Job(scenarios.not_finite, {"kind": kind, "where": where})
            for kind, where in BAD
        },
        **{f"scaled {kind}": Job(scenarios.scaled, {"kind": kind}) for kind in KINDS},
        **{
            f"uneven {kind} {name}": Job(scenarios.uneven, {"kind": kind, "name": name})
            for kind, name in UNEVEN
        },
        "uneven, late": Job(scenarios.uneven, {"kind": "forward", "name": "tower", "late": True}),
        **{
            f"freed {kind} {unused}": Job(scenarios.freed, {"kind": kind, "unused": unused})
            for kind in KINDS
            for unused in (False, True)
        },
        **{
            f"freed {kind}, memory": Job(
                scenarios.in_memory, {"job": "freed", "kind": kind, "unused": False}
            )
            for kind in KINDS
        },
        **{
            f"bytes {policy} {cap}": Job(scenarios.bytes_sent, {"policy": policy, "cap": cap})
            for policy, cap in BYTES
        },
        **{
            f"late {attention} {how}": Job(
                scenarios.late_owner, {"attention": attention, "how": how}
            )
            for attention, how in LATE
        },
        **{f"jitter {kind}": Job(scenarios.jitter, {"kind": kind}) for kind in KINDS},
        "nested": Job(scenarios.nested),
        "saved": Job(scenarios.saved_under_overlap),
        "step": Job(scenarios.step_is_refused),
        "pending": Job(scenarios.pending_is_waited_for),
    }
    return run_ranks(jobs, ranks=2, seconds=60)


@pytest.fixture(scope="module")
def on_four() -> Outcomes:
    jobs = {
        **{name: Job(run_case, {"name": name}) for name in ON_FOUR},
        **{
            f"{name}, memory": Job(scenarios.in_memory, {"job": "run_case", "name": name})
            for name in IN_MEMORY
        },
        "subgroup, memory": Job(
            scenarios.in_memory, {"job": "on_subgroup", "name": "tower, scatter"}
        ),
        "uneven, memory": Job(
            scenarios.in_memory, {"job": "uneven", "kind": "scatter", "name": "tower"}
        ),
        "jitter, memory": Job(scenarios.in_memory, {"job": "jitter", "kind": "forward"}),
        **{f"subgroup {name}": Job(scenarios.on_subgroup, {"name": name}) for name in SUBGROUPS},
        **{
            f"lonely {kind} {policy}": Job(scenarios.lonely, {"kind": kind, "policy": policy})
            for kind in KINDS
            for policy in ("greedy", "elements")
        },
        "bytes elements": Job(scenarios.bytes_sent, {"policy": "elements", "cap": 25}),
        "bytes greedy": Job(scenarios.bytes_sent, {"policy": "greedy", "cap": 25}),
        "saved": Job(scenarios.saved_under_overlap),
        "jitter": Job(scenarios.jitter, {"kind": "forward"}),
        "uneven": Job(scenarios.uneven, {"kind": "scatter", "name": "tower"}),
    }
    return run_ranks(jobs, ranks=4, seconds=90)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_through_memory_as_over_the_network(on_four: Outcomes, name: str) -> None:
    """Four ranks of one host, to the bit."""
    same_everywhere(results(on_four, f"{name}, memory"))


def test_a_group_of_some_ranks_through_memory(on_four: Outcomes) -> None:
    outside, one, outside_too, three = results(on_four, "subgroup, memory")
    assert outside == outside_too == {"group rank": None}
    assert [one["group rank"], three["group rank"]] == [0, 1]
    same_everywhere([one, three])


@pytest.mark.parametrize("name", ["uneven", "jitter"])
def test_ranks_out_of_time_through_memory(on_four: Outcomes, name: str) -> None:
    same_everywhere(results(on_four, f"{name}, memory"))


def results(outcomes: Outcomes, job: str) -> list[Any]:
    return [outcome.result() for outcome in outcomes[job]]


def same_everywhere(ranks: list[Any]) -> None:
    for seen in ranks:
        assert not any(seen["differences"]), seen["differences"]
    assert len({seen["digest"] for seen in ranks}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler(on_two: Outcomes, kind: str) -> None:
    assert results(on_two, f"scheduled {kind}") == [[], []]


@pytest.mark.parametrize(("kind", "where"), BAD)
def test_no_rank_steps_by_what_is_not_finite(on_two: Outcomes, kind: str, where: str) -> None:
    for seen in results(on_two, f"{where} {kind}"):
        assert seen["moved"][1] == 0 and all(seen["moved"][:1] + seen["moved"][2:])
        assert seen["skipped"] == 1
        assert seen["differences"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_grad_scaler(on_two: Outcomes, kind: str) -> None:
    """What overflows on one rank is skipped on all, and lowers the scale of all."""
    for seen in results(on_two, f"scaled {kind}"):
        assert seen["moved"][2] == 0 and all(seen["moved"][:2] + seen["moved"][3:])
        assert seen["scales"] == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        assert seen["skipped"] == 1
        assert seen["differences"] == []


@pytest.mark.parametrize(("kind", "name"), UNEVEN)
def test_ranks_that_run_out_of_data(on_two: Outcomes, kind: str, name: str) -> None:
    ranks = results(on_two, f"uneven {kind} {name}")
    same_everywhere(ranks)
    assert [seen["moved later"] for seen in ranks] == [[], []]


def test_the_last_step_is_over_where_a_join_ends(on_two: Outcomes) -> None:
    """Gathers do not run on there: whoever ends a join reads parameters."""
    ranks = results(on_two, "uneven, late")
    same_everywhere(ranks)
    assert [seen["moved later"] for seen in ranks] == [[], []]


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_does_not_keep_its_module_alive(on_two: Outcomes, kind: str, unused: bool) -> None:
    """DDP holds the hook from C++, where Python's collector does not see a circle."""
    assert results(on_two, f"freed {kind} {unused}") == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_what_went_through_memory(on_two: Outcomes, kind: str) -> None:
    assert results(on_two, f"freed {kind}, memory") == [[], []]


@pytest.mark.parametrize(("policy", "cap"), BYTES)
def test_bytes_of_an_all_reduce(on_two: Outcomes, policy: str, cap: float) -> None:
    for seen in results(on_two, f"bytes {policy} {cap}"):
        assert seen["sent"] == [seen["all_reduce"]] * 3


@pytest.mark.parametrize("policy", ["elements", "greedy"])
def test_bytes_on_four_ranks(on_four: Outcomes, policy: str) -> None:
    for seen in results(on_four, f"bytes {policy}"):
        assert seen["sent"] == [seen["all_reduce"]] * 3


@pytest.mark.parametrize(("attention", "how"), LATE)
def test_parameters_that_come_late_are_waited_for(
    on_two: Outcomes, attention: bool, how: str
) -> None:
    """Also those that a module reads of another one, which is never called."""
    ranks = results(on_two, f"late {attention} {how}")
    for seen in ranks:
        assert all(seen["losses"])
        assert seen["differences"] == []
    assert min(ranks[0]["left"]) > 0  # backward ended before they had come


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_different_speed(on_two: Outcomes, kind: str) -> None:
    same_everywhere(results(on_two, f"jitter {kind}"))


def test_two_optimizers(on_two: Outcomes) -> None:
    same_everywhere(results(on_two, "nested"))


@pytest.mark.parametrize("ranks", ["on_two", "on_four"])
def test_saved_and_loaded_under_overlap(request: pytest.FixtureRequest, ranks: str) -> None:
    for seen in results(request.getfixturevalue(ranks), "saved"):
        assert seen["differences"] == []
        assert seen["went on"] and seen["untouched"]
        assert seen["entries"] == 12


def test_step_is_the_hooks(on_two: Outcomes) -> None:
    for seen in results(on_two, "step"):
        assert seen == {"differences": [], "returned": None}


def test_nothing_is_left_on_its_way(on_two: Outcomes) -> None:
    for seen in results(on_two, "pending"):
        assert all(left == 12 for left in seen["left"])
        assert seen["then"] == 0


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(on_four: Outcomes, name: str) -> None:
    ranks = results(on_four, name)
    same_everywhere(ranks)
    for seen in ranks:
        assert all(seen["losses"]) and seen["finite"]


@pytest.mark.parametrize("name", SUBGROUPS)
def test_a_group_of_some_ranks(on_four: Outcomes, name: str) -> None:
    outside, one, outside_too, three = results(on_four, f"subgroup {name}")
    assert outside == outside_too == {"group rank": None}
    assert [one["group rank"], three["group rank"]] == [0, 1]
    same_everywhere([one, three])
    assert all(one["moved"]) and all(three["moved"])


@pytest.mark.parametrize("policy", ["greedy", "elements"])
@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_than_parameters(on_four: Outcomes, kind: str, policy: str) -> None:
    ranks = results(on_four, f"lonely {kind} {policy}")
    same_everywhere(ranks)
    assert all(all(seen["moved"]) for seen in ranks)


def test_four_ranks_of_different_speed(on_four: Outcomes) -> None:
    same_everywhere(results(on_four, "jitter"))


def test_four_ranks_run_out_of_data(on_four: Outcomes) -> None:
    same_everywhere(results(on_four, "uneven"))
