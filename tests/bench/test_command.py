"""The command, from its options to its files, on tiny sizes."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks import command, publish
from benchmarks import contestants as who
from benchmarks.command import bench
from benchmarks.records import Report
from benchmarks.workloads import SMALL_1, SMALL_10
from tests.choices import case

from .reports import report

TAKEN = (who.FLOOR, "blocked", who.FOREACH, who.FUNCTIONAL)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


@pytest.mark.usefixtures("parts_here")
def test_a_tiny_run_from_end_to_end(tmp_path: Path) -> None:
    chosen = [f"--contestant={name}" for name in TAKEN]
    places = [f"--workload={SMALL_10}", "--optimizer=AdamW", f"--output={tmp_path}"]
    sections = ["--section=steps", "--section=memory", "--section=threads"]
    result = call("--size=tiny", "--threads=1", "--rounds=2", *sections, *places, *chosen)
    assert result.exit_code == 0, result.output
    found = Report.load(tmp_path / "bench.json")
    assert found.failed == {}
    (cell,) = found.cells
    assert cell.failed == {}
    assert set(TAKEN) == {name for heat in cell.heats for name in heat.seconds}
    assert all(len(times) == 2 for heat in cell.heats for times in heat.seconds.values())
    assert [one.way for one in found.two_threads] == ["blocked", *TAKEN[2:]]
    assert all(len(one.alone) == len(one.beside) == 2 for one in found.two_threads)
    assert {one.way for one in found.memory} <= {"blocked", who.FOREACH}
    for heading in ("# Benchmarks", f"## {SMALL_10}", "## Two threads"):
        assert heading in (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert (tmp_path / "bench.png").exists()
    assert "2/5" in result.output or "1/5" in result.output  # progress, line by line
    assert "for a first look only" in result.output


def test_part_of_a_run_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("nothing is measured before that")

    monkeypatch.setattr(command, "run", measured)
    for option in ("--quick", "--size=tiny", "--section=ready", "--optimizer=SGD"):
        result = call("--write", option)
        with case(option=option):
            assert result.exit_code == 2
            assert "--write needs a whole run in full size" in result.output


def test_quick_and_size_exclude_each_other() -> None:
    result = call("--quick", "--size=full")
    assert result.exit_code == 2
    assert "--quick is --size quick" in result.output


def test_an_earlier_run_is_published(site: Path) -> None:
    report().save(site / "run.json")
    result = call(f"--from={site / 'run.json'}", "--write", f"--output={site / 'runs'}")
    assert result.exit_code == 0, result.output
    assert publish.latest() == report()
    assert (site / "docs" / "benchmarks.md").read_text() == publish.page(report())
    assert (site / "docs" / "benchmarks.png").exists()


@pytest.mark.parametrize("size", ["quick", "full"])
def test_a_small_or_partial_run_is_not_published(site: Path, size: str) -> None:
    part = report(size)
    if size == "full":
        part.cells[:] = [cell for cell in part.cells if cell.workload == SMALL_1]
    part.save(site / "run.json")
    result = call(f"--from={site / 'run.json'}", "--write", f"--output={site / 'runs'}")
    assert result.exit_code == 2
    assert "--write takes whole runs in full size" in result.output
    assert not (site / "docs").exists()
    assert publish.latest() is None
