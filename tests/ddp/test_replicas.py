"""Replicas stay replicas: whichever rank has a compiler, and whenever that gets done."""

import pytest

from functional_optim.executors import EXECUTORS, LaneExecutor
from tests.ranks import Job, Outcomes, run_ranks

from . import jobs

EXACT = [
    "reference",
    "script",
    *(n for n, one in EXECUTORS.items() if isinstance(one, LaneExecutor) and one.exact),
]
"""Executors whose steps are bit for bit the reference's."""
COMPILERS = {"one has none": ["there", "none"], "one is slow": ["slow", "there"]}
COMPILING = ("auto", "compile")

JOBS = {
    f"{front_end}, {optimizer}, {executor}, {who}": Job(
        jobs.train,
        {
            "front_end": front_end,
            "optimizer": optimizer,
            "executor": executor,
            "compilers": compilers,
        },
    )
    for front_end in ("hook", "class")
    for optimizer in jobs.OPTIMIZERS
    for executor in EXACT
    for who, compilers in COMPILERS.items()
    if executor in COMPILING or who == "one has none"
    if front_end == "class" or optimizer != "clipped"  # a hook has no total before the last bucket
}


@pytest.fixture(scope="session")
def outcomes() -> Outcomes:
    return run_ranks(JOBS, ranks=2, seconds=120)


def test_every_exact_executor_is_tried() -> None:
    assert set(EXACT) == {"auto", "reference", "script", "blocked", "compile"}


@pytest.mark.parametrize("name", JOBS)
def test_replicas_are_equal(name: str, outcomes: Outcomes) -> None:
    """After 30 steps, on every rank, as by the reference (fault 0)."""
    found = [one.result() for one in outcomes[name]]
    front_end, optimizer, executor, who = name.split(", ")
    reference = outcomes[f"{front_end}, {optimizer}, reference, one has none"][0].result()
    assert {one["digest"] for one in found} == {reference["digest"]}
    compiled = [bool(one["loops"]) for one in found]
    if executor in COMPILING:
        assert compiled == [one != "none" for one in COMPILERS[who]]
        warned = [len(one["warned"]) for one in found]
        assert warned == [int(one == "none") for one in COMPILERS[who]], found
