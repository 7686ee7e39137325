"""Claims of papers, and for each of them the measurements that would reproduce it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.claims.runs import (
    ADAMW_2,
    ADAMW_8,
    AHEAD,
    ALONE,
    DATA_PARALLEL,
    DILOCO,
    FED_BACK,
    FORGETFUL,
    MEAN_4,
    MEAN_16,
    MUON_2,
    MUON_8,
)

SEEDS = (0, 1, 2)
AS_GOOD = 0.02
"""Nats by which a loss may be greater and still count as the same."""
NEAR = 0.05
"""Nats by which a loss may be greater and still count as near."""

Losses = Mapping[str, Sequence[float]]
"""For each run, the loss of each seed."""


class Difference(NamedTuple):
    """Upper bound of the loss of one run minus the loss of another run, in every seed."""

    run: str
    other: str
    at_most: float
    """Upper bound in nats. Below 0, the loss has to be less by this amount."""
    beyond: tuple[str, str] | None = None
    """Two further runs: the loss of the first less that of the second is subtracted too."""

    @property
    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs of the difference."""
        return (self.run, self.other, *(self.beyond or ()))

    @property
    def words(self) -> str:
        """Return the difference in words: ``a, less b``."""
        pairs = [(self.run, self.other), *([self.beyond] if self.beyond else [])]
        said = [f"{one}, less {other}" for one, other in pairs]
        return said[0] if len(said) == 1 else ", less ".join(f"({one})" for one in said)

    def measured(self, losses: Losses) -> list[float]:
        """Return the loss of the run minus the loss of the other for each seed, less ``beyond``."""
        found = _less(losses, self.run, self.other)
        if self.beyond is None:
            return found
        pairs = zip(found, _less(losses, *self.beyond), strict=True)
        return [one - other for one, other in pairs]

    def holds(self, losses: Losses) -> bool:
        """Return True if the difference held in every seed; NaN does not hold."""
        return all(difference <= self.at_most for difference in self.measured(losses))


def _less(losses: Losses, run: str, other: str) -> list[float]:
    return [one - two for one, two in zip(losses[run], losses[other], strict=True)]


class Claim(NamedTuple):
    """Claim of a paper, and the differences that all have to hold."""

    words: str
    source: str
    differences: Sequence[Difference]

    def verdict(self, losses: Losses) -> str:
        """Return the verdict on the claim: "reproduced" or "not reproduced"."""
        held = all(one.holds(losses) for one in self.differences)
        return "reproduced" if held else "not reproduced"


CLAIMS: Sequence[Claim] = (
    Claim(
        "2 bits with error feedback are as good as float32, and 2 bits without are worse",
        "Therien et al. 2025, arXiv 2505.23725; Karimireddy et al. 2019, arXiv 1901.09847",
        (Difference(FED_BACK, DILOCO, AS_GOOD), Difference(FED_BACK, FORGETFUL, -AS_GOOD)),
    ),
    Claim(
        "outer Nesterov is better than none with one replica, too",
        "Douillard et al. 2023, arXiv 2311.08105; as lookahead, Zhang et al. 2019, arXiv "
        "1907.08610",
        (Difference(AHEAD, ALONE, 0.0),),
    ),
    Claim(
        "a mean every 4 or 16 steps loses little against data-parallel with the same samples",
        "Lin et al. 2018, arXiv 1808.07217",
        (Difference(MEAN_4, DATA_PARALLEL, NEAR), Difference(MEAN_16, DATA_PARALLEL, NEAR)),
    ),
    Claim(
        "DiLoCo loses little against data-parallel with the same samples",
        "Douillard et al. 2023, arXiv 2311.08105",
        (Difference(DILOCO, DATA_PARALLEL, NEAR),),
    ),
    Claim(
        "Muon within loses less from 2 to 8 replicas than AdamW within",
        "Therien et al. 2025, arXiv 2505.23725",
        (Difference(MUON_8, MUON_2, -AS_GOOD, beyond=(ADAMW_8, ADAMW_2)),),
    ),
)
