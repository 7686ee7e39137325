"""Sharded training on real ranks, in a size for tests."""

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import sharded as who
from benchmarks import sharded_launch, sharded_parts
from benchmarks.command import bench
from benchmarks.records import Report
from benchmarks.sharded_launch import RankError, run_ranks
from benchmarks.sharded_models import TASKS

SECONDS = 100.0


def train(model: str, ranks: int, *names: str, rounds: int = 1) -> dict[str, Any]:
    given = {"names": names, "rounds": rounds, "iterations": 2}
    found = run_ranks("time", model, "tiny", ranks, given, limit_seconds=SECONDS)
    assert all(one == found[0] for one in found), "all ranks see the same figures"
    return dict(found[0])


@pytest.mark.parametrize(("model", "ranks"), [(who.LAYERS_10, 2), (who.GPT, 3)])
def test_every_contestant_trains_as_one_unsharded_optimizer(model: str, ranks: int) -> None:
    found = train(model, ranks, *who.NAMES, rounds=2)
    assert set(found["seconds"]) == set(who.NAMES)
    assert all(len(one) == 2 and min(one) > 0 for one in found["seconds"].values())
    for distance, total in found["off"].values():
        assert 0 <= distance <= who.TOLERANCE / 2
        assert 0 <= total <= who.SUM_TOLERANCE / 2


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("idle", r"its parameters are off those of the unsharded AdamW by 1 of how far"),
        ("raise", "rank 1: ValueError: on purpose"),
        ("hang", "hang: no rank went on for 25 s"),
    ],
)
def test_a_contestant_in_trouble_is_named(
    trouble: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(Path(__file__).with_name("troubled_rank.py"))
    monkeypatch.setattr(sharded_launch, "COMMAND", ("-W", "ignore", script, trouble))
    given = {"names": [who.DDP_FUSED, who.TORCH_ZERO], "rounds": 1, "iterations": 1}
    with pytest.raises(RankError, match=why) as found:
        run_ranks("time", who.LAYERS_10, "tiny", 2, given, limit_seconds=25.0)
    assert found.value.where == who.TORCH_ZERO


def test_peaks_and_saving_are_measured() -> None:
    place: Any = {"model": who.LAYERS_10, "ranks": 2, "size": "tiny", "tell": lambda _: None}
    peak = sharded_parts.run_peak(**place, name=who.HOOK_ELEMENTS)
    assert peak.failed == ""
    assert 2**26 < peak.peaks[0] < 2**32  # torch alone takes more, a small model not much
    saving = sharded_parts.run_saving(**place, rounds=2)
    assert saving.failed == ""
    assert {name: len(taken) for name, taken in saving.seconds.items()} == {
        who.DCP: 2,
        who.SAVE: 2,
    }
    task = TASKS[who.LAYERS_10]["tiny"]
    assert saving.parameters == sum(param.numel() for param in task.model().parameters())
    assert min(saving.written_bytes.values()) >= 8 * saving.parameters


def test_ranks_of_different_data_and_equal_models() -> None:
    for tasks in TASKS.values():
        task = tasks["tiny"]
        first, second = task.batch(0)[0], task.batch(1)[0]
        assert first.shape == second.shape and not first.equal(second)
        assert first.equal(task.batch(0)[0])
        one, other = task.model().state_dict(), task.model().state_dict()
        assert all(one[key].equal(other[key]) for key in one)


def test_the_section_from_end_to_end(tmp_path: Path) -> None:
    taken = (who.DDP_FUSED, who.TORCH_BEST, who.JUDGED)
    chosen = [f"--contestant={name}" for name in taken]
    options = ["--size=tiny", "--rounds=2", "--section=sharded", f"--output={tmp_path}"]
    result = CliRunner().invoke(bench, [*options, "--place=10 layers, 2 ranks", *chosen])
    assert result.exit_code == 0, result.output
    found = Report.load(tmp_path / "bench.json")
    assert found.failed == {}
    (place,) = found.sharded
    assert place.cell.failed == {}
    assert set(place.off) == set(taken)
    assert {one.way: one.failed for one in found.sharded_peaks} == dict.fromkeys(taken, "")
    assert [len(one.peaks) for one in found.sharded_peaks] == [2, 2, 2]
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    for heading in ("time per iteration", "peak memory of a rank"):
        assert f"## Sharded training: {heading}" in text
    assert (tmp_path / "bench-sharded.png").exists()
    assert sys.executable not in text
