"""Promises are judged by the measured figures, and are missed if a figure is missing."""

from dataclasses import replace
from typing import Any

from benchmarks import contestants as who
from benchmarks.merging import KEYS
from benchmarks.records import Cell, Memory, Ready, Threads
from benchmarks.targets import MEMORY_BYTES, Target, targets
from benchmarks.workloads import GPT2, MANY, SMALL_1, SMALL_10
from tests.choices import case

from .reports import cell, report

SLOWER = dict.fromkeys([*who.PEERS, who.SCRIPTED], 100.0)


def missed(found: list[Target]) -> list[str]:
    return [one.promise for one in found if "MISSED" in one.verdict]


def test_a_fast_report_meets_every_target() -> None:
    found = targets(report())
    assert [one.verdict for one in found] == ["met"] * len(found)
    assert len(found[0].checks) == 42  # three large workloads, seven optimizers, two ways
    by_promise = {one.promise: one for one in found}
    assert len(by_promise["`auto` at most 1.00 x the best peer everywhere"].checks) == 49


MISSES: list[tuple[str, dict[str, float], list[str]]] = [
    (GPT2, {who.AUTO: 1.11}, ["at most 1.1 x the floor"]),
    (GPT2, {who.AUTO: 1.10}, []),
    (GPT2, {who.GATHERED: 1.11}, ["at most 1.1 x the floor"]),
    (SMALL_10, {who.GATHERED: 21.0}, ["never slower than torch's fused"]),
    (SMALL_1, {who.AUTO: 8.1, **SLOWER}, ["at most 8 microseconds"]),
    (SMALL_10, {who.AUTO: 1.5}, ["at most 0.7 x torch.optim's best"]),
    (SMALL_10, {who.TORCHOPT: 0.9}, ["x the best peer"]),
    (MANY, {who.PLAIN: 3.0}, ["flat buffers: at most 0.1"]),
    (MANY, {who.PLAIN_GATHERED: 3.5}, ["separate gradients: at most 0.15"]),
    (MANY, {"blocked": 3.3, who.LOOP: 9.0, who.FOREACH: 9.0}, ["`blocked` at most 3.2"]),
    (SMALL_10, {"blocked": 2.1}, ["`blocked` faster than"]),
]


def test_each_target_can_be_missed() -> None:
    whole = report()
    places = [(one.workload, one.optimizer) for one in whole.cells]
    for workload, changed, promises in MISSES:
        slow = replace(whole, cells=[*whole.cells])
        slow.cells[places.index((workload, "AdamW"))] = cell(workload, "AdamW", **changed)
        found = [one for one in targets(slow) if "MISSED" in one.verdict]
        with case(workload=workload, changed=changed):
            assert len(found) == len(promises)
            for one, part in zip(found, promises, strict=True):
                assert part in one.promise and one.worst is not None
                assert one.worst.where.startswith(f"AdamW, {workload}: ")


def test_memory_and_readiness_can_be_missed() -> None:
    slow = report()
    slow.memory.append(Memory("1 x 50 M", "AdamW", "auto", 100, MEMORY_BYTES + 2))
    slow.ready[0] = Ready("compiled", 0.4, [0.06, 0.06, 0.01])
    assert len(missed(targets(slow))) == 2


def test_a_thread_that_is_held_up_is_a_target_missed() -> None:
    slow = report()
    slow.two_threads[1] = Threads("compiled", [2.0], [1.0], [0.75], [1.0])
    (promise,) = missed(targets(slow))
    assert "keeps 80% of its speed" in promise


def test_a_peer_is_not_judged_by_our_memory() -> None:
    fine = report()
    fine.memory.append(Memory("1 x 50 M", "AdamW", "torch foreach", 100, MEMORY_BYTES + 2))
    assert missed(targets(fine)) == []


def test_a_contestant_that_failed_is_a_target_missed() -> None:
    broken = report()
    broken.cells[0] = Cell(GPT2, "SGD", "cpu", [], {}, {who.AUTO: "RuntimeError: no"})
    found = missed(targets(broken))
    assert any("x the floor" in one for one in found)
    assert any("x the best peer" in one for one in found)
    broken = report()
    broken.failed["ready: compiled, process 1"] = "ended with 1"
    assert len(missed(targets(broken))) == 1


def test_what_does_not_exist_is_no_target() -> None:
    fine = report()
    absent = {who.FUSED: "torch has no fused Lion"}
    fine.cells[0] = Cell(GPT2, "SGD", "cpu", cell(GPT2, "SGD").heats, absent)
    before = sum(len(one.checks) for one in targets(report()))
    assert sum(len(one.checks) for one in targets(fine)) == before - 1
    assert missed(targets(fine)) == []


def test_what_was_not_asked_for_is_not_measured() -> None:
    nothing: dict[str, Any] = {name: [] for name in KEYS}
    assert {one.verdict for one in targets(replace(report(), **nothing))} == {"not measured"}
