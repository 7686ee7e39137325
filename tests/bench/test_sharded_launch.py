"""Ranks are watched, and ended, by whoever started them; these are scripts that only speak."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharded as who
from benchmarks import sharded_launch, sharded_parts
from benchmarks.sharded_launch import RankError, run_ranks

SPEAK = """
import json, os, sys, time
order = json.loads(sys.stdin.readline())
rank = order["rank"]
def say(**line):
    print(json.dumps(line), flush=True)
"""


def ranks(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(sharded_launch, "COMMAND", ("-c", SPEAK + script))


def call(limit: float = 20.0, **given: Any) -> list[Any]:
    return run_ranks("time", who.LAYERS_10, "tiny", 2, given, limit_seconds=limit)


def test_every_rank_has_its_order_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, "say(result=[rank, order['ranks'], order['given'], order['size']])")
    assert call(names=["a"]) == [[rank, 2, {"names": ["a"]}, "tiny"] for rank in range(2)]


def test_what_a_rank_prints_is_told_of_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, "say(at=f'a{rank}'); say(at=f'b{rank}'); say(result=0)")
    told: list[str] = []
    run_ranks("time", who.GPT, "tiny", 2, {}, limit_seconds=20.0, tell=told.append)
    assert told == ["a0", "b0"]


def test_a_failure_names_the_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(
        monkeypatch,
        "say(at='x')\nif rank == 1: say(failed='ValueError: no', at='x')\ntime.sleep(60)",
    )
    with pytest.raises(RankError, match="^x: rank 1: ValueError: no$") as found:
        call()
    assert found.value.where == "x"


def test_a_hang_names_the_contestant_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, "say(at='x')\nif rank == 0: say(at='y')\ntime.sleep(600)")
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"hang: .*\(rank 0 at y, rank 1 at x\)") as found:
        call(limit=3.0)
    assert found.value.where == "x"
    assert time.monotonic() - begin < 60


def test_a_death_is_told_with_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "say(at='x')\nif rank: print('my end', file=sys.stderr); os._exit(7)\ntime.sleep(60)"
    ranks(monkeypatch, script)
    with pytest.raises(RankError, match="^x: rank 1 ended with 7: my end$"):
        call()


def test_all_are_dead_when_it_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks(
        monkeypatch,
        f"open(f'{tmp_path}/{{rank}}', 'w').write(str(os.getpid()))\n"
        "say(at='x')\n"
        "if rank == 0: say(result=0)\n"
        "time.sleep(600)",
    )
    with pytest.raises(RankError, match="hang"):
        call(limit=5.0)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_ranks_that_never_listen_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_launch, "COMMAND", ("-c", "pass"))
    with pytest.raises(RankError, match=r"^the start: rank \d ended with 0: nothing was said"):
        call()


# ------------------------------------------------------------------------- what becomes of a heat


def troubled(monkeypatch: pytest.MonkeyPatch, trouble: dict[str, str]) -> None:
    """Ranks that give each contestant a second, and have trouble with some of them."""
    ranks(
        monkeypatch,
        f"trouble = {json.dumps(trouble)}\n"
        "names = order['given']['names']\n"
        "for name in names:\n"
        "    say(at=name)\n"
        "    if name in trouble and rank == 1:\n"
        "        say(failed=trouble[name], at=name); time.sleep(600)\n"
        "say(result={'seconds': {name: [1.0] for name in names},"
        " 'off': {name: [0.5, 0.25] for name in names}})",
    )


def run(only: Sequence[str] = ()) -> Any:
    return sharded_parts.run_sharded(
        model=who.LAYERS_10, ranks=2, size="tiny", rounds=1, only=only, tell=lambda _: None
    )


def test_a_contestant_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled(monkeypatch, {who.FSDP: "RuntimeError: no", who.STEP_GREEDY: "wrong"})
    found = run()
    assert found.cell.failed == {
        who.FSDP: "rank 1: RuntimeError: no",
        who.STEP_GREEDY: "rank 1: wrong",
    }
    assert [one.name for one in found.cell.heats] == list(who.HEATS)
    timed = {name for heat in found.cell.heats for name in heat.seconds}
    assert timed == {*who.NAMES} - {*found.cell.failed}
    assert set(found.off.values()) == {0.5} and set(found.sums_off.values()) == {0.25}


def test_who_failed_once_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled(monkeypatch, {who.TORCH_BEST: "no"})
    found = run([who.TORCH_BEST, who.FSDP, who.HOOK_ELEMENTS])
    assert found.cell.failed == {who.TORCH_BEST: "rank 1: no"}
    assert [list(heat.seconds) for heat in found.cell.heats] == [[who.FSDP], [who.HOOK_ELEMENTS]]


def test_what_is_nobodys_fault_ends_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, "say(at='the unsharded model'); say(failed='no', at='the unsharded model')")
    with pytest.raises(RankError, match="the unsharded model"):
        run()


def test_a_heat_that_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled(monkeypatch, {})
    monkeypatch.setattr(sharded_parts, "free_bytes", lambda: 2**20)
    found = run()
    assert found.cell.heats == []
    assert set(found.cell.absent) == {*who.NAMES} - {*who.ANCHORS}
    assert "of memory, 0.0 GiB are free" in found.cell.absent[who.FSDP]


def test_twenty_layers_fit_into_twenty_gibibytes() -> None:
    parameters = sharded_parts.numel(who.LAYERS_20, "full")
    assert parameters == 20 * (2000 * 2000 + 2000)
    for others in who.HEATS.values():
        assert sharded_parts.needed_bytes((*who.ANCHORS, *others), parameters, 2) < 20 * 2**30


def test_a_peak_is_that_of_the_worst_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, "say(result=100 + rank)")
    given: Any = {"model": who.LAYERS_10, "ranks": 2, "size": "tiny"}
    found = sharded_parts.run_peak(**given, name=who.FSDP, tell=lambda _: None)
    assert (found.peaks, found.failed) == ([101], "")
    ranks(monkeypatch, "say(failed='no', at='x'); time.sleep(60)")
    found = sharded_parts.run_peak(**given, name=who.FSDP, tell=lambda _: None)
    assert found.failed.endswith(": no")


def test_saving_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, "say(failed='disk full', at='save'); time.sleep(60)")
    given: Any = {"model": who.LAYERS_10, "ranks": 2, "size": "tiny", "rounds": 1}
    found = sharded_parts.run_saving(**given, tell=lambda _: None)
    assert "disk full" in found.failed and found.failed.startswith("save: rank ")
    assert found.seconds == {}
