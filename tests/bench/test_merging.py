"""Parts that are measured again are merged into an earlier run."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import command, publish
from benchmarks.command import bench
from benchmarks.merging import KEYS, SECTIONS, merged
from benchmarks.records import Cell, Heat, Report
from benchmarks.workloads import SMALL_10
from tests.choices import case

from .reports import DATES, report


def anew(seconds: float) -> Report:
    """Return a later report of the same run, with one cell measured again."""
    earlier = report()
    old = next(one for one in earlier.cells if (one.workload, one.optimizer) == (SMALL_10, "AdamW"))
    cell = Cell(old.workload, old.optimizer, old.device, [Heat("executors", {"auto": [seconds]})])
    empty = {name: [] for name in KEYS}
    return replace(earlier, **{**empty, "cells": [cell], "failed": {}, "skipped": {}})


def test_every_list_of_a_report_has_a_key() -> None:
    lists = {one.name for one in fields(Report) if str(one.type).startswith("list")}
    assert lists == set(KEYS)


def test_what_is_measured_takes_its_place_and_the_rest_stays() -> None:
    earlier, later = report(), anew(0.25)
    found = merged(earlier, later, {"AdamW, " + SMALL_10})
    assert len(found.cells) == len(earlier.cells)
    changed = [one for one, old in zip(found.cells, earlier.cells, strict=True) if one != old]
    assert changed == later.cells
    assert found.memory == earlier.memory and found.ready == earlier.ready


def test_each_section_says_when_it_was_measured() -> None:
    """A section that mixes old and new figures lists the days of both."""
    day = {"steps": ["2026-02-01"]}
    found = merged(report(), replace(anew(0.25), dates=day), set())
    assert found.dates == DATES | {"steps": ["2026-01-31", "2026-02-01"]}
    found = merged(report(), replace(report(), dates=day), set())
    assert found.dates == DATES | day
    lists = [name for names in SECTIONS.values() for name in names]
    assert sorted(lists) == sorted(KEYS)


def test_an_error_of_a_part_that_ran_again_is_forgotten() -> None:
    earlier = replace(report(), failed={"one": "broke", "other": "broke"})
    assert merged(earlier, anew(0.25), {"one"}).failed == {"other": "broke"}


def test_runs_that_do_not_belong_together_are_refused() -> None:
    changes: list[dict[str, Any]] = [{"rounds": 77}, {"size": "tiny"}, {"machine": {"cpu": "x"}}]
    for change in changes:
        with case(**change), pytest.raises(ValueError, match="only runs that agree in"):
            merged(report(), replace(anew(0.25), **change), set())


def test_the_command_measures_a_part_onto_a_run(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report().save(site / "run.json")
    kept: list[float] = []

    def run(settings: object, show: object, keep: Any) -> Report:
        keep(anew(0.125))
        kept.append(len(Report.load(site / "out" / "bench.json").cells))
        return anew(0.25)

    monkeypatch.setattr(command, "run", run)
    onto, output = f"--onto={site / 'run.json'}", f"--output={site / 'out'}"
    result = CliRunner().invoke(bench, [onto, "--optimizer=AdamW", output, "--write"])
    assert result.exit_code == 0, result.output
    assert kept == [len(report().cells)]
    latest = publish.latest()
    assert latest == merged(report(), anew(0.25), set())
