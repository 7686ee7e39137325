"""Bytes that averaging sends: counted on real ranks, planned, judged and shown."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import averaging as who
from benchmarks import averaging_sent
from benchmarks import run as running
from benchmarks.averaging_targets import averaging_targets
from benchmarks.checks import Target
from benchmarks.merging import KEYS, merged
from benchmarks.plan import Part, Settings, parts
from benchmarks.records import Report
from benchmarks.sharded_models import BROAD, TASKS
from benchmarks.tables import details, summary
from tests.choices import case

from .reports import counted, report


def judged(of: Report) -> Target:
    (one,) = averaging_targets(of)
    return one


def test_the_arithmetic_of_one_million_parameters() -> None:
    """The expected bytes of one million parameters match a calculation by hand.

    On 4 ranks, one mean sends 2 x 3/4 x 4 bytes for each parameter.
    """
    module = TASKS[BROAD]["full"].model()
    numel = 4 * (512 * 512 + 512)
    mean, chunks, blocks = 6 * numel, -(-numel // 4096), numel // 256
    last = numel % 4096
    largest = (chunks - 1) * 128 + -(-last // 32)
    for name, expected in (
        (who.DDP, mean),
        ("periodic, H = 64", mean),
        ("hierarchical, 2 ranks every 4, all every 16", mean + 3 * 4 * numel),
        ("streaming, H = 16, 4 fragments", mean),
        ("DiLoCo, H = 16, Blocks, 8 bits", 3 * (numel + 4 * blocks)),
        ("DiLoCo, H = 16, TopK, 1/32", 3 * (largest * 3 // 2 + 2 * largest)),
    ):
        with case(name=name):
            assert who.WAYS[name].sent_bytes(module, 4) == expected


def test_the_promise_can_be_missed() -> None:
    assert judged(report()).verdict == "met"
    assert len(judged(report()).checks) == len(who.WAYS)
    for sent, verdict in ((1019, "met"), (1021, "**MISSED**"), (981, "met"), (979, "**MISSED**")):
        found = report()
        found.averaging_sent[3] = counted(who.DDP, sent=sent)
        with case(sent=sent):
            assert judged(found).verdict == verdict
    broken = judged(replace(report(), failed={who.BYTES: "ended with 1"}))
    assert broken.missing == (who.BYTES,) and "MISSED" in broken.verdict


def test_tables_have_what_was_counted() -> None:
    found = report()
    found.averaging_sent[2] = counted("periodic, H = 16", expected=100.0, sent=101)
    text = details(found)
    assert "| DDP | 252 | 250 | 1.0100 | 1.00 |" in text
    assert "| periodic, H = 16 | 25 | 25 | 1.0100 | 10.0 |" in text
    assert "Averaging over 4 ranks sends what its arithmetic says, within 2 %" in summary(found)


def plan(settings: Settings) -> list[Part]:
    return [part for part in parts(settings, "") if part.section == "averaging"]


def test_it_is_planned_whole_or_not_at_all() -> None:
    assert who.BYTES in {part.name for part in plan(Settings("full", 9, 2))}
    assert plan(Settings("full", 9, 2, contestants=("floor",))) == []
    assert plan(Settings("full", 9, 2, optimizers=("Lion",))) == []


def test_where_nothing_is_counted_the_reason_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging_sent.sockets, "uncounted", lambda: "no kernel to ask")
    (part, *_) = plan(Settings("tiny", 2, 2))
    empty: dict[str, Any] = {name: [] for name in KEYS}
    found = replace(report(), **empty, skipped={})
    running._add_averaging_sent(found, part, averaging_sent.run_sent(**part.given, tell=print))
    assert f"Skipped: {who.BYTES}: no kernel to ask." in details(found)
    assert judged(found).verdict == "not measured"
    later = replace(report(), skipped={})
    assert merged(found, later, {who.BYTES}).skipped == {}
