"""Promises of sharded training, and their checks."""

from collections.abc import Iterator
from statistics import median

from benchmarks import sharded as who
from benchmarks.checks import Check, Target, target
from benchmarks.ratios import ratio, spread
from benchmarks.records import Report
from benchmarks.sharded_balance import ELEMENTS, GREEDY, LARGEST_FIRST

LAYERS = (who.LAYERS_10, who.LAYERS_20)

LAYERS_LIMIT = 0.85
DDP_LIMIT = 1.05
TORCH_LIMIT = 1.00
PEAK_LIMIT = 0.95
SAVING_LIMIT = 1.00
ELEMENTS_LIMIT = 1.001
LARGEST_FIRST_LIMIT = 1.0


def sharded_targets(report: Report) -> list[Target]:
    """Return every promise with its figures."""
    layers = (str(who.Place(name, 2)) for name in LAYERS)
    return [
        target(
            f"10 and 20 layers, 2 ranks: `{who.JUDGED}` at most {LAYERS_LIMIT} x torch ZeRO's best",
            _times(report, tuple(layers), who.TORCH_BEST, LAYERS_LIMIT),
        ),
        target(
            f"`{who.JUDGED}` at most {DDP_LIMIT} x DDP with fused AdamW and bucket views",
            _times(report, tuple(who.PLACES), who.DDP_FUSED, DDP_LIMIT),
        ),
        target(
            f"`{who.JUDGED}` never slower than torch ZeRO's best",
            _times(report, tuple(who.PLACES), who.TORCH_BEST, TORCH_LIMIT),
        ),
        target(
            f"Peak memory of a rank with this model at most {PEAK_LIMIT} x torch ZeRO's best",
            _peaks(report),
        ),
        target(
            f"Saving a sharded state, files synced, never slower than `{who.DCP}`",
            _saving(report),
        ),
        target(
            f"`{ELEMENTS}`: largest rank at most {ELEMENTS_LIMIT} x the mean", _elements(report)
        ),
        target(f"`{LARGEST_FIRST}` never above torch's partition", _largest_first(report)),
    ]


def _failed(report: Report, start: str) -> Iterator[str]:
    return (name for name in report.failed if name.startswith(start))


def _times(
    report: Report, places: tuple[str, ...], peer: str, limit: float
) -> Iterator[Check | str]:
    yield from (name for one in places for name in _failed(report, f"sharded, {one}"))
    for one in report.sharded:
        place = str(who.Place(one.model, one.ranks))
        if place not in places:
            continue
        found = ratio(one.cell, who.JUDGED, peer)
        if found is not None:
            yield Check(f"{place}: {who.JUDGED} / {peer}", found.median, limit, str(found))
        elif {who.JUDGED, peer} & (one.cell.failed.keys() | one.cell.absent.keys()):
            yield f"{place}: {who.JUDGED} / {peer}"


def _peaks(report: Report) -> Iterator[Check | str]:
    judged = tuple(f"{who.MEMORY_PLACE}: {one}" for one in (who.JUDGED, who.TORCH_BEST))
    yield from (name for name in _failed(report, "sharded memory") if name.endswith(judged))
    peaks = {one.way: one for one in report.sharded_peaks}
    if who.JUDGED not in peaks or who.TORCH_BEST not in peaks:
        return
    ours, theirs = peaks[who.JUDGED], peaks[who.TORCH_BEST]
    place = f"{who.Place(ours.model, ours.ranks)}: {who.JUDGED} / {who.TORCH_BEST}"
    if len(ours.peaks) != len(theirs.peaks) or not ours.peaks:
        yield place
        return
    found = spread(ours.peaks, theirs.peaks)
    shown = f"{found}, {median(ours.peaks) / 2**20:,.0f} MiB"
    yield Check(place, found.median, PEAK_LIMIT, shown)


def _saving(report: Report) -> Iterator[Check | str]:
    yield from _failed(report, "sharded saving")
    for one in report.sharded_saving:
        place = f"{who.Place(one.model, one.ranks)}, {one.parameters / 1e6:.0f} M parameters"
        if one.failed:
            yield place
            continue
        if who.DCP not in one.seconds:
            continue  # an earlier run with another peer
        ours, theirs = one.seconds[who.SAVE], one.seconds[who.DCP]
        shown = f"{spread(theirs, ours)} times as fast"
        yield Check(place, spread(ours, theirs).median, SAVING_LIMIT, shown)


def _elements(report: Report) -> Iterator[Check | str]:
    yield from _failed(report, "sharded balance")
    for one in report.balance:
        value = one.over_mean(ELEMENTS)
        yield Check(f"{one.model}, {one.ranks} ranks", value, ELEMENTS_LIMIT, f"{value:.5f}")


def _largest_first(report: Report) -> Iterator[Check | str]:
    yield from _failed(report, "sharded balance")
    for one in report.balance:
        value = one.over_mean(LARGEST_FIRST) / one.over_mean(GREEDY)
        where = f"{one.model}, {one.ranks} ranks"
        yield Check(where, value, LARGEST_FIRST_LIMIT, f"{value:.4f} of torch's")
