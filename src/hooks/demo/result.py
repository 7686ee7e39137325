"""What the ranks measured, and the verdict on it. Plain data: nothing of torch is in here."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
class RunResult:
    """One run (A or B) as one rank saw it."""

    losses: list[float]
    """Training loss of this rank's own batch, for every step."""
    validation: list[tuple[int, float]]
    """(steps made, loss), the first before any step and the last after all."""
    from_rank_zero: Difference
    """Final parameters of this rank and of rank 0."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class RankResult:
    """Everything that one rank has to report."""

    rank: int
    front_end: str
    """What stepped run A."""
    numel: int
    """Elements of all parameters of one model."""
    hook: RunResult
    """Run A: our front-end."""
    torch: RunResult
    """Run B: torch's optimizer."""
    difference: Difference
    """Final parameters of A and B, on this rank."""
    peak_rss_bytes: int
    """Most memory that the process ever had: both models, text, Python and torch."""
    sample: str
    """Text that model A wrote (rank 0 only)."""

    def save(self, folder: Path) -> None:
        """Write this result to ``folder``, under the rank's name."""
        (folder / f"{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def load(folder: Path) -> list[RankResult]:
    """What the ranks saved, in the order of ranks."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return [_rank_result(data) for data in sorted(found, key=lambda data: int(data["rank"]))]


def _rank_result(data: dict[str, Any]) -> RankResult:
    return RankResult(
        **{
            **data,
            "hook": _run_result(data["hook"]),
            "torch": _run_result(data["torch"]),
            "difference": Difference(**data["difference"]),
        }
    )


def _run_result(data: dict[str, Any]) -> RunResult:
    validation = [(int(step), float(loss)) for step, loss in data["validation"]]
    reference = Difference(**data["from_rank_zero"])
    return RunResult(**{**data, "validation": validation, "from_rank_zero": reference})


def judge(ranks: Sequence[RankResult]) -> list[str]:
    """What is wrong with these results, one sentence each; none if all is well.

    On every rank, the final parameters of the two runs must be equal bit by bit, and so must
    those of each run on different ranks; and the validation loss must have fallen clearly.
    """
    wrong = []
    for one in ranks:
        if not one.difference.same_bits:
            wrong.append(
                f"rank {one.rank}: the parameters of the two runs differ, by up to "
                f"{one.difference.largest:.3g}; every bit must be the same"
            )
        for name, run in (("A", one.hook), ("B", one.torch)):
            if not run.from_rank_zero.same_bits:
                wrong.append(
                    f"run {name}: the parameters on rank {one.rank} and rank 0 differ, by up to "
                    f"{run.from_rank_zero.largest:.3g}; every bit must be the same"
                )
    first, last = ranks[0].hook.validation[0][1], ranks[0].hook.validation[-1][1]
    if not last < LOSS_SHARE * first:  # written so that NaN is wrong as well
        wrong.append(
            f"the validation loss went from {first:.3f} to {last:.3f}; it must fall below "
            f"{LOSS_SHARE * first:.3f}"
        )
    return wrong
