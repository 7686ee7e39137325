"""Promises of averaging, and their checks."""

from collections.abc import Iterator

from benchmarks import averaging as who
from benchmarks.checks import Check, Target, target
from benchmarks.records import AveragingSent, Report

SENT_LIMIT = 0.02
"""Allowed distance of the counted bytes from the calculated bytes, as a share."""


def averaging_targets(report: Report) -> list[Target]:
    """Return every promise with its figures."""
    return [
        target(
            f"Averaging over {who.RANKS} ranks sends what its arithmetic says, within "
            f"{100 * SENT_LIMIT:g} %, as the kernel counts it",
            _sent(report),
        )
    ]


def farthest_ratio(one: AveragingSent) -> float:
    """Return counted over expected bytes, for the rank that is farthest from its expected bytes."""
    ratios = (sent / one.expected_bytes for sent in one.sent_bytes)
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def _sent(report: Report) -> Iterator[Check | str]:
    yield from (name for name in report.failed if name == who.BYTES)
    for one in report.averaging_sent:
        ratio = farthest_ratio(one)
        yield Check(one.way, abs(ratio - 1), SENT_LIMIT, f"{ratio:.4f} of it")
