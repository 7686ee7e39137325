"""A report with made-up figures, for tests."""

from benchmarks import averaging, remote, sharded
from benchmarks import contestants as who
from benchmarks.cases import CASES
from benchmarks.convergence import AGAIN, FLOAT32, NEAREST, RUNS
from benchmarks.merging import SECTIONS
from benchmarks.records import (
    AveragingRace,
    AveragingSent,
    Balance,
    Cell,
    Convergence,
    Heat,
    Memory,
    Ready,
    Remote,
    Report,
    Sharded,
    ShardedPeak,
    ShardedSaving,
    Threads,
)
from benchmarks.workloads import SMALL_1, WORKLOADS

MACHINE = {
    "cpu": "Some CPU",
    "python": "3.11.7",
    "torch": "2.13.0",
    "gpu": "",
}
DATES = {name: ["2026-01-31"] for name in SECTIONS} | {"memory": ["2026-01-29", "2026-01-30"]}
FAST = dict.fromkeys(who.NAMES, 2.0) | {
    who.FLOOR: 1.0,
    who.FUSED: 20.0,
    **dict.fromkeys(who.OURS, 1.0),
}
"""Figures that meet every target. The unit is seconds, or microseconds for one small parameter."""

LOSSES = dict.fromkeys(RUNS, 2.01) | {FLOAT32: 2.0, AGAIN: 2.03, NEAREST: 2.5}


def cell(workload: str, optimizer: str, device: str = "cpu", **changed: float) -> Cell:
    unit = 1e6 if workload == SMALL_1 else 1.0
    seconds = {name: [value / unit, value / unit] for name, value in {**FAST, **changed}.items()}
    return Cell(workload, optimizer, device, [Heat("all", seconds)])


def trained(name: str, loss: float) -> Convergence:
    own = {name: [3.0, 5.0]} if RUNS[name].storage else {}
    seconds = {FLOAT32: [2.0, 2.0], **own}
    return Convergence(name, 1000, 200, 3e-4, 4.5, loss, 10.0, seconds, "compile; compiled")


TRAINED = dict.fromkeys(sharded.NAMES, 4.0) | {
    sharded.DDP_FUSED: 2.0,
    sharded.TORCH_BEST: 2.5,
    sharded.JUDGED: 2.0,
}
PEAKS = {sharded.TORCH_BEST: 900 << 20, sharded.JUDGED: 720 << 20}
SPREAD = {"greedy": 2.0, "largest_first": 2.0, "elements": 1.0005}


def spread_over(name: str, ranks: int, **changed: float) -> Balance:
    largest = {policy: round(10_000 * value) for policy, value in {**SPREAD, **changed}.items()}
    return Balance(name, ranks, largest, dict.fromkeys(largest, 10_000 * ranks))


def place(name: str, **changed: float) -> Sharded:
    one = sharded.PLACES[name]
    seconds = {key: [value, value] for key, value in {**TRAINED, **changed}.items()}
    off = dict.fromkeys(seconds, 1e-4)
    timed = Cell(name, sharded.RULE, "cpu", [Heat("all", seconds)])
    return Sharded(*one, 1000, 2, timed, off, dict.fromkeys(seconds, 1e-6))


def saving(*ours: float) -> ShardedSaving:
    seconds = {sharded.DCP: [10.0, 20.0], sharded.SAVE: list(ours)}
    written = {sharded.DCP: 640 << 20, sharded.SAVE: 640 << 20}
    return ShardedSaving(*sharded.SAVING_PLACE, 80_000_000, seconds, written)


def counted(way: str, expected: float = 1000.0, sent: int = 1010) -> AveragingSent:
    return AveragingSent(way, averaging.RANKS, 1000, 4, [sent] * averaging.RANKS, expected)


def raced(way: str, samples: int = 400) -> AveragingRace:
    curve = [[0.0, 4.5], [1.5, 3.0]]
    return AveragingRace(
        way, averaging.RANKS, 1000, 2.0, 100.0, 10.0, "", 98.5, 20.5, 10, samples, curve
    )


STEPPED = {remote.RPC: 0.001, remote.THREADS: 0.001, remote.SCRIPTED: 0.002, remote.PYTHON: 0.002}


def stepped(rule: str, model: str, trainers: int) -> Remote:
    seconds = {name: [STEPPED[name]] * 2 for name in remote.names_of(rule)}
    once = {name: [1.0, 1.0] for name in seconds}
    return Remote(model, rule, trainers, 1000, 4, seconds, once, dict(once))


def report(size: str = "full") -> Report:
    return Report(
        dict(MACHINE),
        size,
        2,
        2,
        [cell(workload, optimizer) for workload in WORKLOADS for optimizer in CASES],
        [Memory("1 x 50 M", "AdamW", "blocked", 200_000_000, 1_000_000)],
        [
            Threads("blocked", [2.0, 4.0], [1.0, 2.0]),  # of a run that did not measure the rest
            Threads("compiled", [2.0, 4.0], [1.0, 2.0], [0.9, 1.8], [1.0, 2.0]),
        ],
        [Ready("compiled", 0.4, [0.04]), Ready("torch compiled", 40.0, [10.0])],
        [trained(name, loss) for name, loss in LOSSES.items()],
        [place(name) for name in sharded.PLACES],
        [ShardedPeak(*sharded.MEMORY_PLACE, name, [peak]) for name, peak in PEAKS.items()],
        [saving(1.0, 4.0)],
        [spread_over("GPT-2 small", 8)],
        [counted(way) for way in averaging.WAYS],
        [raced(way) for way in averaging.RACERS],
        [
            stepped(rule, model, count)
            for model in remote.MODELS
            for rule in remote.RULES
            for count in remote.TRAINERS
        ],
        DATES,
        {"gpu": "no CUDA device"},
    )
