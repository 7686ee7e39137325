"""Tests on real processes of rules for whole matrices, sharded by FSDP2."""

import re

import pytest

from tests.choices import case
from tests.ranks import Job, Outcomes, run_at_once, run_ranks
from tests.zero.dying import FAR

from . import jobs, refusals
from .models import OPTIMIZERS

NAMES = [*OPTIMIZERS]
SHORT = 8.0
"""Timeout of a group in seconds, in which a rank does not come."""


@pytest.fixture(scope="module")
def worlds() -> dict[int, Outcomes]:
    """Return the outcomes by the number of ranks."""
    of_two = {
        "as one": Job(jobs.as_one_process, {"names": NAMES}),
        "bfloat16": Job(jobs.as_one_process, {"names": ["muon", "clipped"], "dtype": "bfloat16"}),
        "collectives": Job(jobs.collectives),
        "overlapped": Job(jobs.overlapped),
        "experts": Job(jobs.experts),
        "experts alone": Job(jobs.experts_alone),
        "frozen and tied": Job(jobs.frozen_and_tied),
        "scheduled": Job(jobs.scheduled),
        "added group": Job(jobs.added_group),
        "saved": Job(jobs.saved, {"names": ["muon", "accumulated", "averaged", "8 bits", "soap"]}),
        "from DTensors": Job(jobs.from_dtensors),
        "of another rank": Job(refusals.of_another_rank),
        "evaluated": Job(jobs.evaluated),
        "refused": Job(refusals.refused),
        "failing owner": Job(refusals.failing_owner),
        "failing later": Job(refusals.failing_after_sending),
        "mended": Job(refusals.mended),
        "not finite": Job(jobs.not_finite),
        "beside plain": Job(jobs.beside_plain),
        "moved": Job(jobs.moved),
    }
    of_four = {
        "as one": Job(jobs.as_one_process, {"names": NAMES[::3]}),
        "frozen and tied": Job(jobs.frozen_and_tied),
        "replicas": Job(jobs.on_replicas, {"names": ["muon", "clipped", "accumulated"]}),
        "subgroup": Job(jobs.on_subgroup, {"names": ["muon", "clipped"]}),
        "saved": Job(jobs.saved, {"names": ["finite, clipped"]}),
        "refused": Job(refusals.refused),
        "failing later": Job(refusals.failing_after_sending),
        "meshes": Job(refusals.refused_meshes),
        "beside plain": Job(jobs.beside_plain),
        "collectives": Job(jobs.collectives),
        "planned": Job(jobs.planned),
    }
    return {
        2: run_ranks(of_two, ranks=2, seconds=300),
        4: run_ranks(of_four, ranks=4, seconds=300),
    }


def check_well(worlds: dict[int, Outcomes], *names: str) -> None:
    ran = 0
    for ranks, outcomes in worlds.items():
        for name in names:
            for outcome in outcomes.get(name, ()):
                with case(job=name, ranks=ranks):
                    outcome.result()
                    ran += 1
    assert ran >= 2 * len(names)


def test_owners_step_as_one_process(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "as one", "bfloat16", "not finite", "beside plain")


def test_ranks_make_the_same_plan_of_blocks(worlds: dict[int, Outcomes]) -> None:
    """Ranks make the same plan of blocks, though each process has another hash seed."""
    digests = {outcome.result() for outcome in worlds[4]["planned"]}
    assert len(digests) == 1


def test_two_collectives_for_all_matrices(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "collectives")


def test_rows_travel_while_other_parameters_are_stepped(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "overlapped")


def test_stacks_of_experts_are_stepped_where_they_are(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "experts", "experts alone")


def test_frozen_tied_and_replaced_parameters(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "frozen and tied", "moved")


def test_groups_and_schedulers(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "scheduled", "added group")


def test_owners_are_in_the_sharded_dimension(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "replicas")
    owned = [outcome.result() for outcome in worlds[4]["replicas"]]
    assert owned[:2] == owned[2:] and owned[0] != owned[1]


def test_a_subgroup_whose_ranks_are_others(worlds: dict[int, Outcomes]) -> None:
    assert [one.result() for one in worlds[4]["subgroup"]] == [None, 0, None, 1]


def test_saved_and_loaded(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "saved", "from DTensors", "of another rank")


def test_averages_are_evaluated(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "evaluated")


def test_errors_name_parameters_and_ranks(worlds: dict[int, Outcomes]) -> None:
    check_well(worlds, "refused", "failing owner", "failing later", "mended", "meshes")


def test_a_rank_that_is_missing_in_a_total_is_named() -> None:
    """The bare all-reduce of torch ended in an error without a rank, after the whole timeout."""
    both = {
        "dead": Job(refusals.lost_in_a_total, {"dies": True}, FAR),
        "absent": Job(refusals.lost_in_a_total, {"dies": False}, SHORT),
    }
    for way, found in run_at_once(both, ranks=3, seconds=120).items():
        for rank in (0, 2):
            with case(way=way, rank=rank):
                error = found[rank].result()
                assert error.startswith("TransportError: "), error
                named = set(re.findall(r"group rank (\d)", error.partition("of 3 ranks")[2]))
                assert named == {str(refusals.LOST)}, error
