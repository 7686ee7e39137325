"""Tests on real processes of parameters of which each rank has a shard."""

import pytest

from tests.choices import case, pairs
from tests.ranks import Job, Outcomes, run_ranks

from . import averaged, jobs, numbers, totals, whole

CASES = [
    *pairs(model=["fsdp", "by hand"], dtype=["float32"], executor=["reference", "auto"]),
    *pairs(model=["fsdp", "by hand"], dtype=["float32", "bfloat16"], executor=["blocked"]),
    {"model": "fsdp", "dtype": "bfloat16", "executor": "reference"},
]
"""Cases that match torch's AdamW(foreach=False) bit for bit."""
AS_PLAIN = [
    *pairs(model=["by hand"], dtype=["complex64"], executor=["reference", "blocked"]),
]
"""Cases that match plain tensors of the same values.

torch's AdamW loses the steps of complex shards of different sizes.
"""


LIKE_TORCH = ("torch", "numbers", "plain", "checkpoints", "in backward", "with inputs")


@pytest.fixture(scope="module")
def worlds() -> dict[int, Outcomes]:
    """Return the outcomes by the number of ranks."""
    of_two = {
        "torch": Job(jobs.adamw_as_torch, {"cases": CASES}),
        "numbers": Job(numbers.as_torch),
        "plain": Job(jobs.as_plain_tensors, {"cases": AS_PLAIN}),
        "checkpoints": Job(jobs.checkpoints),
        "in backward": Job(jobs.in_backward),
        "with inputs": Job(jobs.with_inputs),
        "refused": Job(jobs.refused),
        "twice": Job(jobs.twice),
        "redistributed": Job(jobs.redistributed),
        "sums": Job(whole.sums),
        "totals, fsdp": _totals("fsdp", "fsdp"),
        "totals, by hand": _totals("by hand", "by hand"),
        "collectives": Job(totals.collectives),
        "placements": Job(totals.unknown_placements),
    }
    of_three = {
        **{name: of_two[name] for name in ("numbers", "plain", "checkpoints", "sums")},
        "torch": Job(jobs.adamw_as_torch, {"cases": CASES[::4]}),
        "totals, fsdp": _totals("fsdp", "three ranks"),
    }
    of_four = {
        "totals, fsdp": _totals("fsdp", "four ranks"),
        "meshes": Job(totals.on_meshes),
        "tensor parallel": Job(totals.tensor_parallel),
        "averaged": Job(averaged.periodic),
        "averaged as plain tensors": Job(averaged.same_as_plain),
        "not averaged": Job(averaged.refused),
    }
    return {
        2: run_ranks(of_two, ranks=2, seconds=300),
        3: run_ranks(of_three, ranks=3, seconds=300),
        4: run_ranks(of_four, ranks=4, seconds=300),
    }


def _totals(model: str, share: str) -> Job:
    return Job(totals.as_one_process, {"model": model, "tried": totals.share(share)})


def assert_well(worlds: dict[int, Outcomes], *names: str) -> None:
    assert {*names} <= {name for outcomes in worlds.values() for name in outcomes}
    for ranks, outcomes in worlds.items():
        for name in names:
            for outcome in outcomes.get(name, ()):
                with case(job=name, ranks=ranks):
                    outcome.result()


def test_shards_are_stepped_as_torch_steps_them(worlds: dict[int, Outcomes]) -> None:
    """Steps match torch or plain tensors, for every way of stepping that accepts DTensors."""
    assert_well(worlds, *LIKE_TORCH)


def test_totals_are_those_of_all_ranks(worlds: dict[int, Outcomes]) -> None:
    """Fault 9: every stage with a reduction steps as one process does, for any sharding."""
    assert_well(worlds, "totals, fsdp", "totals, by hand", "meshes", "tensor parallel", "sums")


def test_a_total_is_reduced_once(worlds: dict[int, Outcomes]) -> None:
    """Fault 9: one collective reduces a total over all parameters."""
    assert_well(worlds, "collectives")


def test_averagers_average_shards(worlds: dict[int, Outcomes]) -> None:
    """Fault 39: averagers average equal shards of all replicas, and refuse other shards."""
    assert_well(worlds, "averaged", "averaged as plain tensors", "not averaged")


def test_every_stage_with_a_total_is_tried() -> None:
    tried = {stage for one in totals.CASES.values() for stage in one.make().stages}
    assert {*totals.reducing_stages()} <= tried


def test_gradients_may_be_cut_otherwise(worlds: dict[int, Outcomes]) -> None:
    assert_well(worlds, "redistributed", "placements")


def test_what_cannot_step_a_shard_says_so(worlds: dict[int, Outcomes]) -> None:
    """The error names the parameter and an alternative, and changes nothing."""
    assert_well(worlds, "refused")


def test_one_shard_at_two_places(worlds: dict[int, Outcomes]) -> None:
    """Two DTensors of one shard are refused, because they share memory."""
    assert_well(worlds, "twice")
