"""The measurements themselves: peaks, idle contestants, heats that fit, processes that fail."""

from typing import Any

import pytest
import torch

from benchmarks import contestants as who
from benchmarks import memory, process, threads
from benchmarks.cases import CASES
from benchmarks.cell import ANCHORS, heats_of, run_cell
from benchmarks.contestants import Contestants
from benchmarks.plan import SECTIONS, Settings, parts
from benchmarks.process import PartError, run_part
from benchmarks.records import Cell
from benchmarks.workloads import GPT2, MANY, SMALL_1, WORKLOADS
from tests.choices import case

needs_peak = pytest.mark.skipif(bool(memory.missing()), reason=f"peaks: {memory.missing()}")


@needs_peak
def test_a_peak_is_seen_and_what_stays_is_not() -> None:
    held = torch.ones(2**23)

    def greedy() -> None:
        torch.ones(2**24).add_(1)  # 64 MiB, freed at the end of the step

    assert 60 * 2**20 < memory.peak_above(greedy) < 80 * 2**20
    assert memory.peak_above(lambda: held.add_(1)) < 8 * 2**20


@needs_peak
def test_memory_of_every_way_is_measured() -> None:
    ways = ["blocked", "torch foreach", "torch fused"]
    given: Any = {"workload": SMALL_1, "size": "tiny", "ways": ways, "tell": lambda _: None}
    found = memory.run_memory(**given, rules=["AdamW", "clip + decay + QHM"])
    assert [one.way for one in found] == [*ways, *ways[:2]]  # torch has no fused QHM
    assert {one.parameter_bytes for one in found} == {400}
    assert {one.failed for one in found} == {""}


def timed(rule: str, rounds: int, *names: str) -> Cell:
    """Return the times of one small cell."""
    given: Any = {"workload": SMALL_1, "optimizer": rule, "device": "cpu", "size": "tiny"}
    given |= {"rounds": rounds, "turn_seconds": 0.0001, "threads": 1, "only": names}
    return run_cell(**given, tell=lambda _: None)


def test_a_contestant_that_does_nothing_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Contestants.build

    def lazy(group: Contestants, name: str):
        step = build(group, name)
        if name == who.FOREACH:
            group.stepped[name] = [torch.full((3,), who.START)]
            return lambda: None
        if name == who.LOOP:
            group.stepped[name] = [torch.full((3,), float("nan"))]
        return step

    monkeypatch.setattr(Contestants, "build", lazy)
    cell = timed("AdamW", 1, who.FLOOR, who.LOOP, who.FOREACH, who.FUSED)
    assert set(cell.failed) == {who.LOOP, who.FOREACH}
    assert [set(heat.seconds) for heat in cell.heats] == [{who.FLOOR, who.FUSED}]


def test_one_contestants_error_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Contestants, "_ours", broken)
    cell = timed("Lion", 2, who.FLOOR, "blocked", who.LOOP, who.FUSED)
    assert cell.failed == {"blocked": "RuntimeError: on purpose"}
    assert cell.absent == {who.FUSED: "torch has no fused Lion"}
    assert [len(times) for times in cell.heats[-1].seconds.values()] == [2, 2]


def test_everybody_is_in_a_heat() -> None:
    for name, workload in WORKLOADS.items():
        heats = heats_of(workload, "cpu", fused=True)
        everybody = set(ANCHORS).union(*heats.values())
        only_many = {who.PLAIN, who.PLAIN_GATHERED}
        with case(workload=name):
            assert everybody | only_many | {"fused"} == set(who.NAMES)  # "fused" steps on CUDA only
            assert (everybody >= only_many) == (name == MANY)


def test_heats_of_the_largest_workload_fit_in_memory() -> None:
    # Number of float32 buffers of 124 M elements for AdamW, besides the shared gradients.
    flat = {way.executor for way in who.OURS.values()}
    for names in heats_of(WORKLOADS[GPT2], "cpu", fused=True).values():
        present = {*ANCHORS, *names}
        buffers = 1 + 4  # the gradients; the floor's p, g, m, v
        executors = {who.OURS[name].executor for name in (present & {*who.OURS}) - {*who.DOORS}}
        assert executors <= flat
        buffers += 4 * len(executors)  # p, g, m, v in flat buffers
        buffers += 3 * len(present & {*who.DOORS})  # p, m, v; gradients are read in place
        buffers += 3 * any(name in who.TORCH_OPTIM for name in present)  # one p, m, v for all
        buffers += 3 * sum(name in {who.FUNCTIONAL, who.SCRIPTED, who.TORCHOPT} for name in present)
        assert buffers * 4 * WORKLOADS[GPT2].numel("full") < 8.6e9


def test_a_whole_run_has_every_part() -> None:
    plan = list(parts(Settings("full", 9, 2), "scratch"))
    assert {part.section for part in plan} == set(SECTIONS)
    cells = [part for part in plan if part.section == "steps"]
    assert len(cells) == len(WORKLOADS) * len(CASES)
    alone = [part for part in plan if part.section not in ("sharded", "averaging", "remote")]
    assert {part.name for part in alone if part.threads == 1} == {
        f"two threads: {way}" for way in threads.WAYS
    }
    first = next(part for part in plan if part.section == "ready")
    assert first.environment["TORCHINDUCTOR_CACHE_DIR"].startswith("scratch/")


def test_a_choice_is_no_whole_run() -> None:
    assert Settings("full", 3, 1).complete
    assert not Settings("quick", 3, 1).complete
    assert not Settings("full", 3, 1, optimizers=("SGD",)).complete
    assert not Settings("full", 3, 1, contestants=("floor",)).complete


def test_a_part_runs_in_a_process_of_its_own() -> None:
    told: list[str] = []
    given = {"workload": SMALL_1, "size": "tiny", "rules": ["AdamW"], "ways": ["blocked"]}
    (found,) = run_part("memory", given, threads=1, tell=told.append)
    assert found["parameter_bytes"] == 400 and (found["failed"] == "") == (not memory.missing())
    assert told == ["AdamW: blocked"]


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(PartError, match=r"(?s)ended with 1: .*KeyError: 'nonsense'"):
        run_part("nonsense", {}, threads=1)


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(PartError, match=r"took more than 0\.1 s"):  # importing torch takes longer
        run_part("machine", {}, threads=1, limit_seconds=0.1)


def test_a_process_that_never_listens_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(PartError, match="ended with 1: nothing was said"):
        run_part("machine", {}, threads=1)
