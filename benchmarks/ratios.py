"""Ratios, each taken within a round, and their median, least and greatest."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import contestants as who
from benchmarks.records import Cell


class Spread(NamedTuple):
    """A ratio over the rounds."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.least)} to {short(self.greatest)})"


def short(value: float) -> str:
    """Return a ratio with two decimals, or fewer if the decimals carry no information."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def spread(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratio of two contestants that took turns, round by round.

    Raises:
        ValueError: there are no rounds, or the numbers of rounds differ.
    """
    return spread_of([a / b for a, b in zip(ours, theirs, strict=True)])


def spread_of(ratios: Iterable[float]) -> Spread:
    """Return the median, the least and the greatest value.

    Raises:
        ValueError: there is none.
    """
    found = sorted(ratios)
    if not found:
        raise ValueError("there is no ratio without a round: rounds must be at least 1, got 0")
    return Spread(median(found), found[0], found[-1])


def ratio(cell: Cell, ours: str, theirs: str) -> Spread | None:
    """Return the time of ``ours`` over that of ``theirs``, in the rounds of heats with both."""
    ratios = [
        mine / other
        for heat in cell.heats
        if ours in heat.seconds and theirs in heat.seconds
        for mine, other in zip(heat.seconds[ours], heat.seconds[theirs], strict=True)
    ]
    return spread_of(ratios) if ratios else None


class Against(NamedTuple):
    """Ratio, and the contestant that it is taken against."""

    peer: str
    ratio: Spread


def against_best(cell: Cell, ours: str, peers: Sequence[str] = who.PEERS) -> Against | None:
    """Return the ratio to the fastest peer."""
    found = [Against(peer, one) for peer in peers if (one := ratio(cell, ours, peer))]
    return max(found, key=lambda one: one.ratio.median, default=None)
