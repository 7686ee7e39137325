"""Distances of losses from float32's loss, and their limits."""

import math

from benchmarks import convergence
from benchmarks.records import Convergence, Report

TOLERANCE = 0.02
"""Tolerance in nats for each token."""
SPREADS = 2.0
"""Factor of the distance that chance alone causes; the product is added to the tolerance."""


def runs(report: Report) -> dict[str, Convergence]:
    """Return the training runs of a report, by name."""
    return {one.name: one for one in report.convergence}


def float32_spread(report: Report) -> float | None:
    """Return the distance of float32's loss from another seed's; None if one is missing."""
    found = runs(report)
    if convergence.FLOAT32 not in found or convergence.AGAIN not in found:
        return None
    return abs(found[convergence.FLOAT32].loss - found[convergence.AGAIN].loss)


def allowed(report: Report) -> float | None:
    """Return the greatest distance allowed from float32's loss; None if it is unknown."""
    spread = float32_spread(report)
    if spread is None or not math.isfinite(spread):
        return None
    return TOLERANCE + SPREADS * spread


def distance(report: Report, name: str) -> float | None:
    """Return a loss minus float32's, infinite if it is NaN; None if one of the two is missing."""
    found = runs(report)
    if convergence.FLOAT32 not in found or name not in found:
        return None
    value = found[name].loss - found[convergence.FLOAT32].loss
    return math.inf if math.isnan(value) else value
