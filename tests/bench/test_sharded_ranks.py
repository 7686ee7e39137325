"""Sharded training on real ranks, in the size for tests."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import sharded as who
from benchmarks import sharded_launch, sharded_parts, sharded_peers, sharded_rank
from benchmarks.command import bench
from benchmarks.records import Report
from benchmarks.sharded_launch import RankError, run_ranks
from benchmarks.sharded_models import TASKS
from benchmarks.sharded_peers import Contestant, wrapped
from tests.choices import EVERYTHING, case

from .conftest import PATIENCE

PLACES = [(who.GPT, 2), *([(who.LAYERS_10, 2), (who.GPT, 3)] if EVERYTHING else [])]


@pytest.mark.parametrize(("model", "ranks"), PLACES)
def test_every_contestant_trains_as_one_unsharded_optimizer(model: str, ranks: int) -> None:
    given = {"names": who.NAMES, "rounds": 2, "iterations": 2}
    every = run_ranks("time", model, "tiny", ranks, given, limit_seconds=PATIENCE)
    found = every[0]
    assert all(one == found for one in every), "all ranks see the same figures"
    assert set(found["seconds"]) == set(who.NAMES)
    assert all(len(one) == 2 and min(one) > 0 for one in found["seconds"].values())
    for distance, total in found["off"].values():
        assert 0 <= distance <= who.TOLERANCE / 2
        assert 0 <= total <= who.SUM_TOLERANCE / 2


def test_a_contestant_in_trouble_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(Path(__file__).with_name("troubled_rank.py"))
    monkeypatch.setattr(sharded_launch, "COMMAND", ("-W", "ignore", script))
    given = {"names": [who.TORCH_ZERO], "rounds": 1, "iterations": 1}
    with pytest.raises(RankError, match="rank 0: ValueError: on purpose") as found:
        run_ranks("time", who.LAYERS_10, "tiny", 1, given, limit_seconds=PATIENCE)
    assert found.value.where == who.TORCH_ZERO


def test_saving_is_measured() -> None:
    place: Any = {"model": who.LAYERS_10, "ranks": 1, "size": "tiny", "tell": lambda _: None}
    saving = sharded_parts.run_saving(**place, rounds=2)
    assert saving.failed == ""
    assert {name: len(taken) for name, taken in saving.seconds.items()} == {
        who.DCP: 2,
        who.SAVE: 2,
    }
    task = TASKS[who.LAYERS_10]["tiny"]
    assert saving.parameters == sum(param.numel() for param in task.model().parameters())
    assert min(saving.written_bytes.values()) >= 8 * saving.parameters


# --------------------------------------------------------------------- on one rank, in this process


@pytest.fixture
def told(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of contestants that the one rank, this process, comes to."""
    names: list[str] = []
    monkeypatch.setattr(sharded_rank, "say", lambda **line: names.append(line["at"]))
    return names


def test_a_peak_is_measured(told: list[str]) -> None:
    task = TASKS[who.LAYERS_10]["tiny"]
    peak = sharded_rank.peak(task, 1, name=who.DDP_FUSED, iterations=1)
    assert peak > 2**26  # torch alone needs more
    assert told == [who.DDP_FUSED]


def test_who_does_not_step_is_no_contestant(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(task: Any) -> Contestant:
        module = wrapped(task, views=False)
        return Contestant(lambda: None, lambda: iter(module.parameters()))

    monkeypatch.setitem(sharded_peers.BUILDERS, who.TORCH_ZERO, idle)
    names, task = [who.DDP_FUSED, who.TORCH_ZERO], TASKS[who.LAYERS_10]["tiny"]
    with pytest.raises(RuntimeError, match="off those of the unsharded AdamW by 1 of how far"):
        sharded_rank.timed(task, 1, names=names, rounds=1, iterations=1)
    assert told == [sharded_rank.UNSHARDED, *names]


def test_ranks_of_different_data_and_equal_models() -> None:
    for name, tasks in TASKS.items():
        task = tasks["tiny"]
        first, second = task.batch(0)[0], task.batch(1)[0]
        one, other = task.model().state_dict(), task.model().state_dict()
        with case(name=name):
            assert first.shape == second.shape and not first.equal(second)
            assert first.equal(task.batch(0)[0])
            assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.usefixtures("parts_here")
def test_the_section_from_end_to_end(speaking: Callable[[str], None], tmp_path: Path) -> None:
    speaking(
        "names = order['given'].get('names', [])\n"
        "seconds = {name: [0.5, 0.25] for name in names}\n"
        "off = {name: [0.0, 0.0] for name in names}\n"
        "say(at='x'); say(result={'seconds': seconds, 'off': off} if names else 2**26 + rank)"
    )
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
    assert [one.peaks for one in found.sharded_peaks] == [[2**26 + 1] * 2] * 3
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    for heading in ("time per iteration", "peak memory of a rank"):
        assert f"## Sharded training: {heading}" in text
    assert (tmp_path / "bench-sharded.png").exists()
    assert sys.executable not in text
