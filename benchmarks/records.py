"""Records of a run, which JSON keeps: times as they were taken, nothing derived."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Heat:
    """Contestants that took turns."""

    name: str
    seconds: dict[str, list[float]]
    """By contestant: seconds per step, one figure per round."""


@dataclass(frozen=True)
class Cell:
    """One workload and one optimizer."""

    workload: str
    optimizer: str
    device: str
    heats: list[Heat]
    absent: dict[str, str] = field(default_factory=dict)
    """Contestants that do not exist, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Contestants that exist and did not run, and their errors."""


@dataclass(frozen=True)
class Memory:
    """The peak of a step above what was held before it."""

    workload: str
    optimizer: str
    way: str
    parameter_bytes: int
    extra_bytes: int
    failed: str = ""
    """Why there is no figure; empty where there is."""


@dataclass(frozen=True)
class Threads:
    """Two models stepped by two threads, in turns with one after the other."""

    way: str
    one_after_other: list[float]
    together: list[float]
    alone: list[float] = field(default_factory=list)
    """Seconds of a loop in Python that has nothing to do with the steps."""
    beside: list[float] = field(default_factory=list)
    """The same while another thread steps a model."""


@dataclass(frozen=True)
class Ready:
    """Seconds from nothing to the end of the first compiled step."""

    way: str
    cold: float
    """In a process that finds empty caches."""
    warm: list[float]
    """In later processes."""


@dataclass(frozen=True)
class Convergence:
    """A model that was trained in one storage."""

    name: str
    parameters: int
    """Elements of all parameters together."""
    steps: int
    rate: float
    """The greatest learning rate of the schedule."""
    start: float
    """Validation loss before the first step, in nats for each token."""
    loss: float
    """Validation loss after the last step."""
    bytes_per_parameter: float
    """Of parameters, gradients and state together."""
    seconds: dict[str, list[float]]
    """Seconds per step of the optimizer alone, one figure per round: its own, under its name, and
    "float32"."""
    ran: str
    """What ran the steps, and why."""


@dataclass(frozen=True)
class Sharded:
    """A model trained on several ranks, by all contestants in turns."""

    model: str
    ranks: int
    parameters: int
    """Elements of all parameters together."""
    iterations: int
    """In a turn."""
    cell: Cell
    """Seconds per iteration of the slowest rank; the heats, and who is not in them."""
    off: dict[str, float] = field(default_factory=dict)
    """By contestant: how far its parameters were from those of one unsharded AdamW after the first
    steps, by the 2-norm, in units of how far those had moved."""
    sums_off: dict[str, float] = field(default_factory=dict)
    """The same of the sum of all parameters, in units of the 1-norm of how far those had moved."""


@dataclass(frozen=True)
class ShardedPeak:
    """The peak of resident memory of a rank, from its beginning, in processes of their own."""

    model: str
    ranks: int
    way: str
    peaks: list[int]
    """In bytes, of the rank that has the most, turn by turn; none if it failed."""
    failed: str = ""
    """Why there is no figure; empty where there is."""


@dataclass(frozen=True)
class ShardedSaving:
    """Saving the state of a sharded optimizer, in turns."""

    model: str
    ranks: int
    parameters: int
    seconds: dict[str, list[float]]
    """By contestant: of the slowest rank, one figure per round."""
    written_bytes: dict[str, int]
    """By contestant: the size of what it wrote."""
    failed: str = ""
    """Why there are no figures; empty where there are."""


@dataclass(frozen=True)
class Balance:
    """Spread of a model over ranks, in bytes by policy."""

    model: str
    ranks: int
    largest_bytes: dict[str, int]
    """By policy: what the largest rank has of parameters, gradients and state."""
    total_bytes: dict[str, int]
    """By policy: what all ranks have together."""

    def over_mean(self, policy: str) -> float:
        """The largest rank over the mean of all."""
        return self.largest_bytes[policy] * self.ranks / self.total_bytes[policy]


@dataclass(frozen=True)
class AveragingSent:
    """Bytes that ranks send to come to one model in one way, as the kernel counts them."""

    way: str
    ranks: int
    parameters: int
    """Elements of all parameters together."""
    steps: int
    """That were counted: whole periods of the way."""
    sent_bytes: list[int]
    """By rank, in these steps."""
    expected_bytes: float
    """By the arithmetic of the way, of each rank in these steps."""


@dataclass(frozen=True)
class AveragingRace:
    """A model that ranks train over a slow link, for some time."""

    way: str
    ranks: int
    parameters: int
    """Elements of all parameters together."""
    seconds: float
    """Of training."""
    megabits: float
    """In a second, of each rank's link in each direction, as it was set."""
    delay_milliseconds: float
    """Of what a rank sends, as it was set."""
    no_delay: str
    """Why it was not set; empty where it was."""
    found_megabits: float
    """As a message between two ranks found it."""
    round_trip_milliseconds: float
    """As small messages between two ranks found it."""
    steps: int
    """That rank 0 has made in this time."""
    samples: int
    """That all ranks together have trained on."""
    curve: list[list[float]]
    """Pairs of seconds and the validation loss of rank 0's parameters then, in nats a character."""


@dataclass(frozen=True)
class Remote:
    """A model on one server, stepped by the threads of another process, by all in turns."""

    model: str
    optimizer: str
    trainers: int
    """Threads that step at once."""
    parameters: int
    """Elements of all parameters together."""
    tensors: int
    seconds: dict[str, list[float]]
    """By contestant: time over the steps of all trainers together, one figure per round."""
    alone: dict[str, list[float]]
    """By contestant: seconds of a loop in Python in the server's process, while nobody steps."""
    beside: dict[str, list[float]]
    """The same while all trainers step."""
    failed: dict[str, str] = field(default_factory=dict)
    """Contestants that did not run, and their errors."""


@dataclass(frozen=True)
class Report:
    """A whole run."""

    machine: dict[str, str]
    size: str
    rounds: int
    threads: int
    cells: list[Cell] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    two_threads: list[Threads] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    convergence: list[Convergence] = field(default_factory=list)
    sharded: list[Sharded] = field(default_factory=list)
    sharded_peaks: list[ShardedPeak] = field(default_factory=list)
    sharded_saving: list[ShardedSaving] = field(default_factory=list)
    balance: list[Balance] = field(default_factory=list)
    averaging_sent: list[AveragingSent] = field(default_factory=list)
    averaging_races: list[AveragingRace] = field(default_factory=list)
    remote: list[Remote] = field(default_factory=list)
    dates: dict[str, list[str]] = field(default_factory=dict)
    """By section: the days on which its figures were taken."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Sections and parts that cannot run here, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Parts that should have run, and their errors."""

    def save(self, path: Path) -> None:
        """Write it as JSON, times to four digits."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_short(asdict(self)), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "Report":
        """Read what :meth:`save` wrote."""
        return report_from(json.loads(path.read_text(encoding="utf-8")))


def cell_from(found: Mapping[str, Any]) -> Cell:
    """A cell from its JSON."""
    return Cell(**{**found, "heats": [Heat(**heat) for heat in found["heats"]]})


def sharded_from(found: Mapping[str, Any]) -> Sharded:
    """Return the times taken at one place, from their JSON."""
    return Sharded(**{**found, "cell": cell_from(found["cell"])})


def report_from(found: Mapping[str, Any]) -> Report:
    """A report from its JSON; earlier ones have no sharded training, averaging or servers."""
    return Report(
        **{
            **found,
            "cells": [cell_from(one) for one in found["cells"]],
            "memory": [Memory(**one) for one in found["memory"]],
            "two_threads": [Threads(**one) for one in found["two_threads"]],
            "ready": [Ready(**one) for one in found["ready"]],
            "convergence": [Convergence(**one) for one in found["convergence"]],
            "sharded": [sharded_from(one) for one in found.get("sharded", [])],
            "sharded_peaks": [ShardedPeak(**one) for one in found.get("sharded_peaks", [])],
            "sharded_saving": [ShardedSaving(**one) for one in found.get("sharded_saving", [])],
            "balance": [Balance(**one) for one in found.get("balance", [])],
            "averaging_sent": [AveragingSent(**one) for one in found.get("averaging_sent", [])],
            "averaging_races": [AveragingRace(**one) for one in found.get("averaging_races", [])],
            "remote": [Remote(**one) for one in found.get("remote", [])],
        }
    )


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value
