"""Averaging on real processes."""

from pathlib import Path

import pytest

from hooks import AveragingSchedule
from sharding.transport.local import LocalWorld
from tests.averaging_alone import inner_optimizers
from tests.choices import case
from tests.ranks import Job, Outcomes, run_ranks

from . import jobs, resumed, torchs_own

WAYS = ("env://", "tcp://", "file://", "env://, INFO", "env://, DETAIL")


@pytest.fixture(scope="module")
def on_four() -> Outcomes:
    return run_ranks(
        {
            "torch's own": Job(torchs_own.run, {"names": torchs_own.TESTS}),
            "world": Job(jobs.in_the_world, {"delay": 0}),
            "world, delayed": Job(jobs.in_the_world, {"delay": 1}),
            "parts": Job(jobs.in_parts),
            "mesh": Job(jobs.in_a_mesh),
            "sharded": Job(jobs.sharded_inside, {"steps": 7}),
            "gossip": Job(jobs.gossiped),
            "bytes": Job(jobs.bytes_sent, {"steps": 14}),
        },
        ranks=4,
        seconds=120,
    )


def test_torchs_own_tests_pass(on_four: Outcomes) -> None:
    for outcome in on_four["torch's own"]:
        assert outcome.result() == list(torchs_own.TESTS)


def test_processes_have_the_bits_of_threads(on_four: Outcomes) -> None:
    for job, delay in [("world", 0), ("world, delayed", 1)]:
        want = LocalWorld(4).run(lambda group, delay=delay: jobs.alone_and_averaged(group, delay))
        with case(job=job):
            assert [outcome.result() for outcome in on_four[job]] == want
            assert len(set(want)) == (4 if delay else 2)


def test_pairs_of_processes_have_the_bits_of_threads(on_four: Outcomes) -> None:
    want = LocalWorld(4).run(jobs.gossiped)
    assert [tuple(outcome.result()) for outcome in on_four["gossip"]] == want
    assert len({digest for digest, _ in want}) == 4


def test_halves_of_a_world_are_worlds(on_four: Outcomes) -> None:
    want = LocalWorld(2).run(jobs.in_a_half)
    assert all(one != other for one, other in zip(*want, strict=True))
    found = [outcome.result() for outcome in on_four["parts"]]
    assert found == [want[0], want[0], want[1], want[1]]


def test_a_mesh_is_averaged_along_one_dimension(on_four: Outcomes) -> None:
    found = [outcome.result() for outcome in on_four["mesh"]]
    nodes, ranks = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    for rank, together in enumerate(found):  # by means, by an outer rule, in pairs
        assert together == [nodes[rank % 2]] * 3 + [ranks[rank // 2]] * 3


def test_state_is_sharded_inside_a_node_and_averaged_across_nodes(on_four: Outcomes) -> None:
    first, second = LocalWorld(2).run(lambda group: jobs.unsharded(group, steps=7))
    found = [outcome.result() for outcome in on_four["sharded"]]
    assert found == [first, first, second, second]
    assert first != second  # a step follows the last mean


def test_bytes_sent_are_those_of_the_schedule(on_four: Outcomes) -> None:
    """Each rank sends all shares but its own twice: once to be summed, and once as sums."""
    pairs, all_four = AveragingSchedule((2, 4), (2, None), warmup=1).counts(14)
    for outcome in on_four["bytes"]:
        sent, size = outcome.result()
        want = 2 * size * (pairs * 1 / 2 + all_four * 3 / 4)
        assert want <= sent <= 1.02 * want


def test_a_rank_that_joins_late_has_what_the_others_have() -> None:
    """The rank begins with rank 0's state of mid-period; the next mean is equal on all ranks."""
    outcomes = run_ranks({"late": Job(jobs.joins_late)}, ranks=3, seconds=120)["late"]
    begun, ended, steps = zip(*(outcome.result() for outcome in outcomes), strict=True)
    assert begun[2] == begun[0] != begun[1]
    assert len(set(ended)) == 1 and ended[0] not in begun
    assert set(steps) == {8}


def test_a_run_under_a_hook_that_was_stopped_is_never_stopped() -> None:
    """DDP's first backward pass has other buckets; sums over 3 ranks would show a difference."""
    jobs_ = {kind: Job(resumed.stopped_is_never_stopped, {"kind": kind}) for kind in resumed.KINDS}
    for kind, outcomes in run_ranks(jobs_, ranks=3, seconds=120).items():
        for outcome in outcomes:
            with case(kind=kind):
                assert outcome.result() == len(resumed.KINDS[kind][1])


def test_a_stopped_run_with_parts_within_has_the_bits_of_one_that_never_was() -> None:
    todo = {
        name: Job(inner_optimizers.in_the_world, {"name": name}) for name in inner_optimizers.WITHIN
    }
    for name, outcomes in run_ranks(todo, ranks=2, seconds=120).items():
        want = LocalWorld(2).run(
            lambda group, name=name: inner_optimizers.whole_and_stopped(group, name)
        )
        with case(within=name):
            found = [outcome.result() for outcome in outcomes]
            assert found == want
            assert all(whole == stopped for rank in found for whole, stopped in rank)


def test_front_ends_train_however_the_world_was_begun(tmp_path: Path) -> None:
    job = Job(jobs.begun_by, {"ways": WAYS, "folder": str(tmp_path)})
    ranks = run_ranks({"begun": job}, ranks=2, seconds=120, fresh=True)["begun"]
    first, second = (outcome.result() for outcome in ranks)
    alone = {"local SGD", "ZeRO", *jobs.AVERAGERS}
    assert first[WAYS[0]].keys() == {*alone, "local SGD, hook", "PowerSGD", "step hook"}
    assert first[WAYS[-1]].keys() == alone
    for way in WAYS:
        with case(way=way):
            apart = {name for name, one in first[way].items() if second[way][name] != one}
            assert apart == {"delayed"}  # with every other averager, the ranks end equal
            assert first[way].items() <= first[WAYS[0]].items()
