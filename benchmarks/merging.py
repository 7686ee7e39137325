"""Merge of an earlier run and a later one that measured some parts again.

Each figure still comes from one run.
"""

from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from typing import Any

from benchmarks.records import Report

KEYS: dict[str, tuple[str, ...]] = {
    "cells": ("workload", "optimizer", "device"),
    "memory": ("workload", "optimizer", "way"),
    "two_threads": ("way",),
    "ready": ("way",),
    "convergence": ("name",),
    "sharded": ("model", "ranks"),
    "sharded_peaks": ("model", "ranks", "way"),
    "sharded_saving": ("model", "ranks"),
    "balance": ("model", "ranks"),
    "averaging_sent": ("way", "ranks"),
    "averaging_races": ("way", "ranks"),
    "remote": ("model", "optimizer", "trainers"),
}
"""Fields that identify an entry of a list, for each list of a report."""
SECTIONS: dict[str, tuple[str, ...]] = {
    "steps": ("cells",),
    "memory": ("memory",),
    "threads": ("two_threads",),
    "ready": ("ready",),
    "convergence": ("convergence",),
    "sharded": ("sharded", "sharded_peaks", "sharded_saving", "balance"),
    "averaging": ("averaging_sent", "averaging_races"),
    "remote": ("remote",),
}
"""Lists that a section fills, by section."""
SAME = ("size", "rounds", "threads")
"""Fields that must be equal in both runs."""
SAME_MACHINE = ("cpu", "torch", "python")


def merged(earlier: Report, later: Report, names: Collection[str]) -> Report:
    """Return the earlier run, with all parts of the later run in place of the earlier ones.

    Args:
        earlier: a run.
        later: a run of some of its parts.
        names: the parts of the later run. Earlier errors and reasons of these parts are removed.

    Raises:
        ValueError: the runs differ in machine or size.
    """
    _check(earlier, later)
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        found[name] = _joined(getattr(earlier, name), getattr(later, name), key)
    failed, skipped = (
        {name: why for name, why in old.items() if name not in names}
        for old in (earlier.failed, earlier.skipped)
    )
    failed, skipped = failed | later.failed, skipped | later.skipped
    dates = _dates(earlier, later, found)
    return replace(later, dates=dates, failed=failed, skipped=skipped, **found)


def _dates(earlier: Report, later: Report, found: dict[str, list[Any]]) -> dict[str, list[str]]:
    """Return the days of each section. A section with earlier figures has the days of both."""
    dates = dict(earlier.dates)
    for section, days in later.dates.items():
        lists = SECTIONS.get(section, ())
        is_whole = all(len(getattr(later, name)) == len(found[name]) for name in lists)
        before = [] if is_whole else earlier.dates.get(section, [])
        dates[section] = sorted({*before, *days})
    return dates


def _check(earlier: Report, later: Report) -> None:
    pairs = [(name, getattr(earlier, name), getattr(later, name)) for name in SAME]
    pairs += [(name, earlier.machine.get(name), later.machine.get(name)) for name in SAME_MACHINE]
    for name, one, other in pairs:
        if one != other:
            raise ValueError(
                f"the earlier run has {name} {one!r}, this one {other!r}; only runs that agree in "
                f"{', '.join((*SAME, *SAME_MACHINE))} can be put together"
            )
    lists = {one.name for one in fields(Report) if isinstance(getattr(later, one.name), list)}
    assert lists == set(KEYS), "every list of a report needs its key"


def _joined(earlier: Iterable[Any], later: Iterable[Any], key: tuple[str, ...]) -> list[Any]:
    """Return all entries in the order of the earlier run. Later entries replace earlier ones."""
    by_key = {tuple(getattr(one, name) for name in key): one for one in earlier}
    by_key.update({tuple(getattr(one, name) for name in key): one for one in later})
    return list(by_key.values())
