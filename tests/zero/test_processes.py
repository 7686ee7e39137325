"""Tests on processes against one process and against torch's own class."""

import pytest

from tests.choices import case, pairs
from tests.ranks import Job, Outcomes, run_ranks

from . import on_ranks
from .towers import AT_ONCE, CLASSES

POLICIES = ("greedy", "largest_first", "contiguous", "elements", "sliced", "hierarchical")
VIEWS = (False, True)
WHOLE = ("greedy", "largest_first", "contiguous")
TRAINED = [
    *pairs(policy=WHOLE, chain_name=("adamw", "clipped"), views=VIEWS, kind=("Tower", "Pictures")),
    # A norm that is summed rank by rank rounds differently.
    *pairs(policy=POLICIES[3:], chain_name=("adamw",), views=VIEWS, kind=("Tower",))[::2],
]
TRAINED += [
    {"policy": policy, "chain_name": name, "views": name == "finite", "kind": "Tower"}
    for name, policy in zip(AT_ONCE, ("elements", "greedy", "hierarchical"), strict=True)
]
TORCH = pairs(name=CLASSES, views=VIEWS, groups=(False, True))
UNEVEN = [
    {"name": "adam", "policy": "greedy", "schedule": False},
    {"name": "adam", "policy": "elements", "schedule": True},
    {"name": "finite", "policy": "elements", "schedule": True},
]
ASKED = [
    {"name": name, "policy": policy, "steps": steps}
    for name in ("sgd", "momentum", "adamw", "foreign", *AT_ONCE)
    for policy, steps in (("greedy", 0), ("greedy" if name == "foreign" else "elements", 2))
]


@pytest.fixture(scope="module")
def on_four() -> Outcomes:
    jobs = {
        **{f"trained {one}": Job(on_ranks.beside_core, one) for one in TRAINED},
        **{f"uneven {one}": Job(on_ranks.uneven, one) for one in UNEVEN[:1]},
        "subgroup": Job(on_ranks.on_subgroup, {"name": "adam"}),
        "mesh": Job(on_ranks.on_mesh),
    }
    return run_ranks(jobs, ranks=4, seconds=90)


@pytest.fixture(scope="module")
def on_two() -> Outcomes:
    jobs = {
        **{f"torch {one}": Job(on_ranks.beside_torch, one) for one in TORCH},
        **{f"uneven {one}": Job(on_ranks.uneven, one) for one in UNEVEN[1:]},
        "after uneven": Job(on_ranks.goes_on_after_uneven),
        **{f"asked {one}": Job(on_ranks.asked_for_its_state, one) for one in ASKED},
    }
    return run_ranks(jobs, ranks=2, seconds=90)


def test_parameters_are_those_of_one_process(on_four: Outcomes) -> None:
    for one in TRAINED:
        with case(**one):
            digests = {outcome.result() for outcome in on_four[f"trained {one}"]}
            assert len(digests) == 1


def test_beside_torch(on_two: Outcomes) -> None:
    for one in TORCH:
        with case(**one):
            assert [outcome.result() for outcome in on_two[f"torch {one}"]] == [None] * 2


def test_uneven_inputs(on_two: Outcomes, on_four: Outcomes) -> None:
    every = on_two | on_four
    for one in UNEVEN:
        with case(**one):
            assert len({outcome.result() for outcome in every[f"uneven {one}"]}) == 1


def test_training_goes_on_after_uneven_inputs(on_two: Outcomes) -> None:
    assert [outcome.result() for outcome in on_two["after uneven"]] == [None] * 2


def test_a_subgroup_whose_ranks_are_others(on_four: Outcomes) -> None:
    seen = [outcome.result() for outcome in on_four["subgroup"]]
    assert seen == [None, [0, 1, 2], None, [1, 3, 2]]


def test_a_mesh(on_four: Outcomes) -> None:
    assert [outcome.result() for outcome in on_four["mesh"]] == [2] * 4


def test_distributed_checkpoint_asks_for_the_state_and_no_step_is_made(on_two: Outcomes) -> None:
    """Fault 10: torch found ``zero.state`` empty, made a step, and left gradients of zeros."""
    for one in ASKED:
        with case(**one):
            digests = {outcome.result() for outcome in on_two[f"asked {one}"]}
            assert len(digests) == 1
