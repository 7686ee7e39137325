"""Results of the ranks, and the verdict on them. Plain data, without torch."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOSS_SHARE = 0.8
"""The validation loss at the end must be below this share of the loss before the first step."""


@dataclass(frozen=True)
class Difference:
    """Two sets of parameters, compared."""

    same_bits: bool
    largest: float
    """The largest absolute difference of two elements."""


@dataclass(frozen=True)
class WorkerResult:
    """A worker that owns parameters of a run."""

    name: str
    parameter_bytes: int
    state_bytes: int
    steps: int
    gradient_bytes: int
    """That it was sent, in all steps."""
    read_bytes: int
    """That it sent to those who read its parameters."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run on one rank."""

    name: str
    """A letter; the first is A."""
    title: str
    """What stepped it."""
    exact: bool
    """Whether it must have run A's bits: it adds the same gradients in the same order."""
    spread: float
    """Where it is not: by what share of A's last validation loss its own may differ."""
    differs: str
    """Where it is not: why."""
    losses: list[float]
    """Training loss of this rank's own batch, for every step."""
    validation: list[tuple[int, float]]
    """(steps made, loss), the first before any step and the last after all."""
    from_first: Difference
    """Final parameters of this run and of run A, on this rank."""
    from_rank_zero: Difference
    """Final parameters of this rank and of rank 0."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    sent_bytes: float
    """In all steps, between hosts."""
    workers: list[WorkerResult] = field(default_factory=list)
    """Where other processes own the parameters: which."""


@dataclass(frozen=True)
class RankResult:
    """Everything that one rank has to report."""

    rank: int
    numel: int
    """Elements of all parameters of one model."""
    runs: list[RunResult]
    """In the order of their names; the others are compared with the first."""
    peak_rss_bytes: int
    """Most memory that the process ever had: all models, text, Python and torch."""
    sample: str
    """Text that model A wrote (rank 0 only)."""

    def save(self, folder: Path) -> None:
        """Write this result to ``folder``, under the rank's name."""
        (folder / f"{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def load(folder: Path) -> list[RankResult]:
    """Load the results that the ranks saved, in the order of ranks."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return [_rank_result(data) for data in sorted(found, key=lambda data: int(data["rank"]))]


def _rank_result(data: dict[str, Any]) -> RankResult:
    return RankResult(**{**data, "runs": [_run_result(run) for run in data["runs"]]})


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
    """The maximum; NaN, which ``max`` may overlook, wins."""
    return max(values, key=lambda value: (math.isnan(value), value))


def loss_difference(one: RunResult, other: RunResult) -> float:
    """The largest absolute difference of two losses of one step, in training or validation."""
    mine, yours = ([*run.losses, *(loss for _, loss in run.validation)] for run in (one, other))
    return largest(abs(a - b) for a, b in zip(mine, yours, strict=True))


def judge(ranks: Sequence[RankResult]) -> list[str]:
    """Return what is wrong with these results, a sentence each; empty if all is well.

    On every rank, the losses and the final parameters of a run must be run A's bit by bit where it
    makes the same steps, and its last validation loss near A's where it does not; the
    parameters of each run must be equal bit by bit on all ranks; and each run's validation loss
    must have fallen clearly.
    """
    wrong: list[str] = []
    for one in ranks:
        first, *others = one.runs
        for run in others:
            wrong += _exact(one.rank, first, run) if run.exact else _near(one.rank, first, run)
        wrong += [
            f"run {run.name}: the parameters on rank {one.rank} and rank 0 differ, by up to "
            f"{run.from_rank_zero.largest:.3g}; every bit must be the same"
            for run in one.runs
            if not run.from_rank_zero.same_bits
        ]
    return [*wrong, *_not_fallen(ranks[0].runs)]


def _exact(rank: int, first: RunResult, run: RunResult) -> Iterator[str]:
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


def _near(rank: int, first: RunResult, run: RunResult) -> Iterator[str]:
    expected, last = first.validation[-1][1], run.validation[-1][1]
    # Written so that NaN is wrong as well; below, too.
    if not abs(last - expected) <= run.spread * expected:
        yield (
            f"rank {rank}: the last validation losses of runs {first.name} and {run.name} are "
            f"{expected:.4f} and {last:.4f}; they may differ by {run.spread:.1%}"
        )


def _not_fallen(runs: Sequence[RunResult]) -> Iterator[str]:
    for run in runs:
        begin, end = run.validation[0][1], run.validation[-1][1]
        if not end < LOSS_SHARE * begin:
            yield (
                f"run {run.name}: the validation loss went from {begin:.3f} to {end:.3f}; it must "
                f"fall below {LOSS_SHARE * begin:.3f}"
            )
