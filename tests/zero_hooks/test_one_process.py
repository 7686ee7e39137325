"""Tests that hooks on all ranks match one process bit for bit from the first iteration on."""

from typing import Any

import pytest

from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.ranks import Job, run_ranks

from . import scenarios
from .cases import CASES, Lonely, variants
from .runs import INNER_KINDS, KINDS, Case, compare


def same_everywhere(ranks: list[Any]) -> None:
    for seen in ranks:
        assert not any(seen["differences"]), seen["differences"]
        assert seen["moved"] and all(seen["moved"]) and seen["finite"]
        assert all(seen["losses"])
    assert len({seen["digest"] for seen in ranks}) == 1


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(name: str) -> None:
    for one in variants(name):
        with case(kind=one.kind, policy=one.policy):
            same_everywhere(LocalWorld(2).run(lambda group, one=one: compare(one, group)))


def test_an_inner_hook_whose_collectives_are_in_order() -> None:
    """PowerSGD, which starts some collectives in callbacks, works with ``in_order=True``."""
    for kind in INNER_KINDS:
        one = Case(inner="power", kind=kind, hook={"in_order": True}, iterations=5)
        with case(kind=kind):
            same_everywhere(LocalWorld(2).run(lambda group, one=one: compare(one, group)))


@pytest.mark.parametrize("policy", ["greedy", "elements"])
def test_more_ranks_than_parameters(policy: str) -> None:
    for kind in KINDS:
        one = Case(kind=kind, model=Lonely, policy=policy)
        with case(kind=kind):
            same_everywhere(LocalWorld(4).run(lambda group, one=one: compare(one, group)))


ON_PROCESSES = [
    {"name": name, "kind": kind, "policy": policy, "memory": memory, "members": members}
    for name, kind, policy, memory, members in (
        ("max_norm", "scatter", "greedy", True, None),
        ("max_norm", "scatter", "greedy", False, (1, 3)),
        ("attention", "held", "greedy", True, None),
        ("prodigy", "scatter", "greedy", False, None),
        ("prodigy", "interleaved", "greedy", True, (1, 3)),
        ("schedule-free, unused", "scatter", "elements", False, None),
    )
]


def test_processes_are_one_process() -> None:
    """Processes match one process over gloo and shared memory, in the world and in a subgroup.

    tests/zero_drawn draws many other cases.
    """
    jobs = {str(one): Job(scenarios.on_processes, one) for one in ON_PROCESSES}
    outcomes = run_ranks(jobs, ranks=4, seconds=90)
    for one in ON_PROCESSES:
        with case(**one):
            every = [outcome.result() for outcome in outcomes[str(one)]]
            ranks = [seen for seen in every if seen is not None]
            assert len(ranks) == 4 if one["members"] is None else every[0] is every[2] is None
            same_everywhere(ranks)
