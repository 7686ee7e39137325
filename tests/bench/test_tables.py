"""Tests of the tables, pages and pictures of a report."""

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks import contestants as who
from benchmarks.picture import draw
from benchmarks.publish import DETAILS, latest, page
from benchmarks.records import Cell, Heat, Memory, Report
from benchmarks.tables import details, summary, table
from benchmarks.workloads import ONE

from .reports import cell, report


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_the_summary_has_ratios_and_verdicts() -> None:
    slow = report()
    slow.cells[0] = Cell(
        slow.cells[0].workload,
        "SGD",
        "cpu",
        [Heat("all", {who.FLOOR: [1.0, 2.0, 4.0], who.AUTO: [1.5, 2.0, 8.0], who.LOOP: [9.0] * 3})],
    )
    text = summary(slow)
    assert "| SGD | 1.50 (1.00 to 2.00) | 1.00 (1.00 to 1.00) |" in text
    assert "| SGD | 0.22 (0.17 to 0.89) for-loop |" in text
    assert "**MISSED** | 40 of 41 | 1.50 (1.00 to 2.00) at SGD, GPT-2 small: auto / floor |" in text
    assert "Some CPU, 2 threads, torch 2.13.0, Python 3.11.7, float32; steps, threads" in text
    assert "averaging, remote of 2026-01-31; memory of 2026-01-29 and 2026-01-30. Every" in text


def test_a_small_run_says_so() -> None:
    assert "for a first look only" in summary(report("quick"))
    assert "for a first look only" not in summary(report())


def test_details_have_every_section() -> None:
    every = report()
    every.cells.append(cell(ONE, "Lion", "cuda"))
    every.cells.append(Cell(ONE, "QHM", "cuda", [], {}, {"fused": "Error: two\nlines"}))
    every.memory.append(Memory(ONE, "AdamW", "auto", 10, 0, "MemoryError: no"))
    every.failed["two threads: fused"] = "ended with -9"
    text = details(every)
    for part in (
        "## 1 x 50 M on cuda",
        "a copy that moves as many bytes",
        "| AdamW, update_ with blocked | 1.0 MiB (0.50 %) |",
        "| blocked | 2.00 (2.00 to 2.00) |",
        "| compiled | 0.40 s | 0.040 s | 0.004 |",
        "Skipped: gpu: no CUDA device.",
        "- QHM, 1 x 50 M, cuda: fused: Error: two lines",
        "- memory, AdamW, 1 x 50 M: auto: MemoryError: no",
        "- two threads: fused: ended with -9",
    ):
        assert part in text


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    exact = report()
    exact.save(tmp_path / "a" / "b.json")
    assert Report.load(tmp_path / "a" / "b.json") == exact


def test_times_are_kept_to_four_digits(tmp_path: Path) -> None:
    long = dataclasses.replace(report(), cells=[cell(ONE, "SGD", floor=1 / 3)])
    long.save(tmp_path / "long.json")
    kept = Report.load(tmp_path / "long.json")
    assert kept.cells[0].heats[0].seconds["floor"] == [0.3333, 0.3333]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(report(), tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one cell"):
        draw(dataclasses.replace(report(), cells=[]), tmp_path / "none.png")


def test_the_page_shows_the_recorded_run() -> None:
    recorded = latest()
    assert recorded is not None and recorded.size == "full"
    text = DETAILS.read_text(encoding="utf-8")
    assert text == page(recorded), "make bench ARGS='--write --from ...' writes it"
    for name in re.findall(r"!\[.+\]\((.+)\)", text):
        assert (DETAILS.parent / name).exists()


def test_pictures_follow_the_summary() -> None:
    text = page(report())
    assert text.startswith("# Benchmarks\n")
    assert text.index(summary(report())) < text.index("](benchmarks.png)") < text.index("## ")
