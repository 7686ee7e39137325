"""Records of a run for JSON: measured times without derived figures."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Heat:
    """Heat: contestants that took turns."""

    name: str
    seconds: dict[str, list[float]]
    """Seconds per step of each contestant, one figure per round."""


@dataclass(frozen=True)
class Cell:
    """Cell: one workload and one optimizer."""

    workload: str
    optimizer: str
    device: str
    heats: list[Heat]
    absent: dict[str, str] = field(default_factory=dict)
    """Contestants that do not exist, and the reasons."""
    failed: dict[str, str] = field(default_factory=dict)
    """Contestants that exist and did not run, and their errors."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of a step above the memory that was in use before the step."""

    workload: str
    optimizer: str
    way: str
    parameter_bytes: int
    extra_bytes: int
    failed: str = ""
    """Reason for a missing figure; empty if there is a figure."""


@dataclass(frozen=True)
class Threads:
    """Times of two threads that step two models, in turns with one thread after the other."""

    way: str
    one_after_other: list[float]
    together: list[float]
    alone: list[float] = field(default_factory=list)
    """Seconds of a Python loop that has nothing to do with the steps."""
    beside: list[float] = field(default_factory=list)
    """Seconds of the same loop while another thread steps a model."""


@dataclass(frozen=True)
class Ready:
    """Seconds from plain parameters to the end of the first compiled step."""

    way: str
    cold: float
    """Seconds in a process with empty caches."""
    warm: list[float]
    """Seconds in later processes."""


@dataclass(frozen=True)
class Convergence:
    """Model that was trained in one storage."""

    name: str
    parameters: int
    """Number of elements of all parameters together."""
    steps: int
    rate: float
    """The greatest learning rate of the schedule."""
    start: float
    """Validation loss before the first step, in nats for each token."""
    loss: float
    """Validation loss after the last step."""
    bytes_per_parameter: float
    """Bytes of parameters, gradients and state together."""
    seconds: dict[str, list[float]]
    """Seconds per optimizer step, one figure per round: under the run's name, and under
    "float32"."""
    ran: str
    """The executor that ran the steps, and the reason."""


@dataclass(frozen=True)
class Sharded:
    """Model that all contestants train on several ranks, in turns."""

    model: str
    ranks: int
    parameters: int
    """Number of elements of all parameters together."""
    iterations: int
    """Number of iterations in a turn."""
    cell: Cell
    """Seconds per iteration of the slowest rank, with the heats and the failed contestants."""
    off: dict[str, float] = field(default_factory=dict)
    """Distance of each contestant's parameters from those of one unsharded AdamW after the first
    steps. It is a 2-norm, divided by the distance that the unsharded parameters moved."""
    sums_off: dict[str, float] = field(default_factory=dict)
    """Distance of the sum of all parameters, divided by the 1-norm of the unsharded movement."""


@dataclass(frozen=True)
class ShardedPeak:
    """Peak resident memory of a rank since its start, measured in separate processes."""

    model: str
    ranks: int
    way: str
    peaks: list[int]
    """Bytes of the rank that has the most, turn by turn; empty if the measurement failed."""
    failed: str = ""
    """Reason for a missing figure; empty if there is one."""


@dataclass(frozen=True)
class ShardedSaving:
    """Saving the state of a sharded optimizer, in turns."""

    model: str
    ranks: int
    parameters: int
    seconds: dict[str, list[float]]
    """Seconds of the slowest rank for each contestant, one figure per round."""
    written_bytes: dict[str, int]
    """Size of the written files for each contestant."""
    failed: str = ""
    """Reason for missing figures; empty if there are figures."""


@dataclass(frozen=True)
class Balance:
    """Spread of a model over ranks, in bytes for each policy."""

    model: str
    ranks: int
    largest_bytes: dict[str, int]
    """Bytes of parameters, gradients and state on the largest rank, for each policy."""
    total_bytes: dict[str, int]
    """Bytes on all ranks together, for each policy."""

    def over_mean(self, policy: str) -> float:
        """Return the bytes of the largest rank divided by the mean of all ranks."""
        return self.largest_bytes[policy] * self.ranks / self.total_bytes[policy]


@dataclass(frozen=True)
class AveragingSent:
    """Bytes that ranks send for one way of averaging, counted by the kernel."""

    way: str
    ranks: int
    parameters: int
    """Number of elements of all parameters together."""
    steps: int
    """Number of counted steps: whole periods of the way."""
    sent_bytes: list[int]
    """Sent bytes of each rank in these steps."""
    expected_bytes: float
    """Calculated bytes of each rank in these steps."""


@dataclass(frozen=True)
class AveragingRace:
    """Model that ranks train over a slow link for a fixed time."""

    way: str
    ranks: int
    parameters: int
    """Number of elements of all parameters together."""
    seconds: float
    """Training time in seconds."""
    megabits: float
    """Rate of each rank's link in each direction, as it was set, in Mbit/s."""
    delay_milliseconds: float
    """Delay of messages from a rank, as it was set."""
    no_delay: str
    """Reason for a missing delay; empty if there is a delay."""
    found_megabits: float
    """Measured rate of a message between two ranks."""
    round_trip_milliseconds: float
    """Measured round trip of small messages between two ranks."""
    steps: int
    """Number of steps of rank 0 in this time."""
    samples: int
    """Number of samples of all ranks together."""
    curve: list[list[float]]
    """Points of seconds and the validation loss of rank 0's parameters, in nats a character."""


@dataclass(frozen=True)
class Remote:
    """Model on one server that threads of another process step, with all contestants in turns."""

    model: str
    optimizer: str
    trainers: int
    """Number of threads that step at the same time."""
    parameters: int
    """Number of elements of all parameters together."""
    tensors: int
    seconds: dict[str, list[float]]
    """Time divided by the number of all trainers' steps, for each contestant and round."""
    alone: dict[str, list[float]]
    """Seconds of a Python loop in the server's process while no trainer steps, for each
    contestant."""
    beside: dict[str, list[float]]
    """Seconds of the same loop while all trainers step."""
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
    """Days on which the figures of each section were measured."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Sections and parts that cannot run here, and the reasons."""
    failed: dict[str, str] = field(default_factory=dict)
    """Parts that should have run, and their errors."""

    def save(self, path: Path) -> None:
        """Write the report as JSON, with times of four digits."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_short(asdict(self)), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "Report":
        """Read a report that :meth:`save` wrote."""
        return report_from(json.loads(path.read_text(encoding="utf-8")))


def cell_from(found: Mapping[str, Any]) -> Cell:
    """Return a cell from its JSON."""
    return Cell(**{**found, "heats": [Heat(**heat) for heat in found["heats"]]})


def sharded_from(found: Mapping[str, Any]) -> Sharded:
    """Return the times taken at one place, from their JSON."""
    return Sharded(**{**found, "cell": cell_from(found["cell"])})


def report_from(found: Mapping[str, Any]) -> Report:
    """Return a report from its JSON. Older files lack sharded training, averaging and servers."""
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
