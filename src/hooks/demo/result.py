"""Results of the ranks, and checks of these. Plain data, without torch."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOSS_SHARE = 0.8
"""The last validation loss must be below this share of the first."""


@dataclass(frozen=True)
class Difference:
    """Difference of two sets of parameters."""

    same_bits: bool
    largest: float
    """The largest absolute difference of two elements."""


@dataclass(frozen=True)
class WorkerResult:
    """Worker that owns parameters of a run."""

    name: str
    parameter_bytes: int
    state_bytes: int
    steps: int
    gradient_bytes: int
    """Received, in all steps."""
    read_bytes: int
    """Sent to readers of its parameters."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run on one rank."""

    name: str
    """A letter; the first is A."""
    title: str
    """The optimizer."""
    exact: bool
    """True if it must equal run A bit for bit: it adds the same gradients in the same order."""
    spread: float
    """If not exact: the largest relative difference of its last validation loss from A's."""
    differs: str
    """If not exact: why."""
    losses: list[float]
    """Training loss of this rank's own batch, for every step."""
    validation: list[tuple[int, float]]
    """(steps so far, loss): the first before any step, the last after all."""
    from_first: Difference
    """Of the final parameters of this run and of run A, on this rank."""
    from_rank_zero: Difference
    """Of the final parameters of this rank and of rank 0."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    sent_bytes: float
    """In all steps, between hosts."""
    workers: list[WorkerResult] = field(default_factory=list)
    """Workers that own the parameters, if this process does not."""


@dataclass(frozen=True)
class RankResult:
    """Result of one rank."""

    rank: int
    numel: int
    """Elements of all parameters of one model."""
    runs: list[RunResult]
    """In the order of names; each is compared with the first."""
    peak_rss_bytes: int
    """Peak memory of the process: all models, text, Python and torch."""
    sample: str
    """Text that model A wrote (rank 0 only)."""

    def save(self, folder: Path) -> None:
        (folder / f"{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def load(folder: Path) -> list[RankResult]:
    """Load the results that the ranks saved, in the order of ranks."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    found.sort(key=lambda data: int(data["rank"]))
    return [RankResult(**{**one, "runs": list(map(_run_result, one["runs"]))}) for one in found]


def _run_result(data: dict[str, Any]) -> RunResult:
    return RunResult(
        **{
            **data,
            "validation": [(int(step), float(loss)) for step, loss in data["validation"]],
            "from_first": Difference(**data["from_first"]),
            "from_rank_zero": Difference(**data["from_rank_zero"]),
            "workers": [WorkerResult(**one) for one in data["workers"]],
        }
    )


def largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if there is one, which ``max`` may ignore."""
    return max(values, key=lambda value: (math.isnan(value), value))


def loss_difference(one: RunResult, other: RunResult) -> float:
    """Return the largest absolute difference of two runs' losses, in training or validation."""
    mine, yours = ([*run.losses, *(loss for _, loss in run.validation)] for run in (one, other))
    return largest(abs(a - b) for a, b in zip(mine, yours, strict=True))


def judge(ranks: Sequence[RankResult]) -> list[str]:
    """Return one sentence per fault in these results; empty without faults.

    On every rank, losses and final parameters of an exact run must equal run A's bit for bit. The
    last validation loss of other runs must be close to A's. Final parameters of each run must be
    equal bit for bit on all ranks. Each validation loss must fall clearly.
    """
    wrong: list[str] = []
    for one in ranks:
        first, *others = one.runs
        for run in others:
            wrong += (
                _check_exact(one.rank, first, run)
                if run.exact
                else _check_close(one.rank, first, run)
            )
        wrong += [
            f"run {run.name}: the parameters on rank {one.rank} and rank 0 differ, by up to "
            f"{run.from_rank_zero.largest:.3g}; every bit must be the same"
            for run in one.runs
            if not run.from_rank_zero.same_bits
        ]
    return [*wrong, *_check_fallen(ranks[0].runs)]


def _check_exact(rank: int, first: RunResult, run: RunResult) -> Iterator[str]:
    which = f"runs {first.name} and {run.name}"
    if not run.from_first.same_bits:
        yield (
            f"rank {rank}: the parameters of {which} differ, by up to "
            f"{run.from_first.largest:.3g}; every bit must be the same"
        )
    if loss_difference(first, run) != 0:
        yield (
            f"rank {rank}: the losses of {which} differ, by up to "
            f"{loss_difference(first, run):.3g}; every bit must be the same"
        )


def _check_close(rank: int, first: RunResult, run: RunResult) -> Iterator[str]:
    expected, last = first.validation[-1][1], run.validation[-1][1]
    # ``not <=`` instead of ``>``, so that NaN is a fault; also below.
    if not abs(last - expected) <= run.spread * expected:
        yield (
            f"rank {rank}: the last validation losses of runs {first.name} and {run.name} are "
            f"{expected:.4f} and {last:.4f}; they may differ by {run.spread:.1%}"
        )


def _check_fallen(runs: Sequence[RunResult]) -> Iterator[str]:
    for run in runs:
        begin, end = run.validation[0][1], run.validation[-1][1]
        if not end < LOSS_SHARE * begin:
            yield (
                f"run {run.name}: the validation loss went from {begin:.3f} to {end:.3f}; it must "
                f"fall below {LOSS_SHARE * begin:.3f}"
            )
