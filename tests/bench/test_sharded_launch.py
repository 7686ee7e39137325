"""The launcher watches its ranks and ends them. Here the ranks are scripts that print lines."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharded as who
from benchmarks import sharded_launch, sharded_parts
from benchmarks.sharded_launch import RankError, run_ranks

Speaking = Callable[[str], None]


def call(**given: Any) -> list[Any]:
    return run_ranks("time", who.LAYERS_10, "tiny", 2, given, limit_seconds=20.0)


def test_every_rank_has_its_order_and_answers(speaking: Speaking) -> None:
    speaking("say(result=[rank, order['ranks'], order['given'], order['size']])")
    assert call(names=["a"]) == [[rank, 2, {"names": ["a"]}, "tiny"] for rank in range(2)]


def test_what_a_rank_prints_is_told_of_the_first_one(speaking: Speaking) -> None:
    speaking("say(at=f'a{rank}'); say(at=f'b{rank}'); say(result=0)")
    told: list[str] = []
    run_ranks("time", who.GPT, "tiny", 2, {}, limit_seconds=20.0, tell=told.append)
    assert told == ["a0", "b0"]


def test_a_failure_names_the_contestant(speaking: Speaking) -> None:
    speaking("say(at='x')\nif rank == 1: say(failed='ValueError: no', at='x')\nhang()")
    with pytest.raises(RankError, match="^x: rank 1: ValueError: no$") as found:
        call()
    assert found.value.where == "x"


def test_a_hang_names_the_contestant_that_is_behind(speaking: Speaking) -> None:
    speaking("say(at='x')\nif rank == 0: say(at='y')\nhang()")
    why = r"hang: no rank went on for 20 s \(rank 0 at y, rank 1 at x\)"
    with pytest.raises(RankError, match=why) as found:
        call()
    assert found.value.where == "x"


def test_until_each_has_begun_they_may_be_silent_for_longer(speaking: Speaking) -> None:
    speaking("if rank == 0: say(at='x')\nhang()")
    why = f"^{who.START}: hang: no rank went on for {sharded_launch.START_SECONDS:g} s"
    with pytest.raises(RankError, match=why):
        call()


def test_a_death_is_told_with_the_last_words(speaking: Speaking) -> None:
    speaking("say(at='x')\nif rank: print('my end', file=sys.stderr); os._exit(7)\nhang()")
    with pytest.raises(RankError, match="^x: rank 1 ended with 7: my end$"):
        call()


def test_all_are_dead_when_it_is_over(speaking: Speaking, tmp_path: Path) -> None:
    speaking(
        f"open(f'{tmp_path}/{{rank}}', 'w').write(str(os.getpid()))\n"
        "say(at='x')\n"
        "if rank == 0: say(result=0)\n"
        "hang()",
    )
    with pytest.raises(RankError, match="hang"):
        call()
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_ranks_that_never_listen_are_reported(speaking: Speaking) -> None:
    speaking("os._exit(0)")
    with pytest.raises(RankError, match=r"^the start: rank \d ended with 0: nothing was said"):
        call()


# ---------------------------------------------------------------------- a heat with failing ranks


def troubled(speaking: Speaking, trouble: dict[str, str]) -> None:
    """Run ranks that report one second for each contestant, and fail with some contestants."""
    speaking(
        f"trouble = {json.dumps(trouble)}\n"
        "names = order['given']['names']\n"
        "for name in names:\n"
        "    say(at=name)\n"
        "    if name in trouble and rank == 1:\n"
        "        say(failed=trouble[name], at=name); hang()\n"
        "say(result={'seconds': {name: [1.0] for name in names},"
        " 'off': {name: [0.5, 0.25] for name in names}})",
    )


def run(only: Sequence[str] = ()) -> Any:
    return sharded_parts.run_sharded(
        model=who.LAYERS_10, ranks=2, size="tiny", rounds=1, only=only, tell=lambda _: None
    )


def test_a_contestant_that_fails_does_not_end_the_others(speaking: Speaking) -> None:
    troubled(speaking, {who.FSDP: "RuntimeError: no", who.STEP_GREEDY: "wrong"})
    found = run()
    assert found.cell.failed == {
        who.FSDP: "rank 1: RuntimeError: no",
        who.STEP_GREEDY: "rank 1: wrong",
    }
    assert [one.name for one in found.cell.heats] == list(who.HEATS)
    timed = {name for heat in found.cell.heats for name in heat.seconds}
    assert timed == {*who.NAMES} - {*found.cell.failed}
    assert set(found.off.values()) == {0.5} and set(found.sums_off.values()) == {0.25}


def test_who_failed_once_is_not_asked_again(speaking: Speaking) -> None:
    troubled(speaking, {who.TORCH_BEST: "no"})
    found = run([who.TORCH_BEST, who.FSDP, who.HOOK_ELEMENTS])
    assert found.cell.failed == {who.TORCH_BEST: "rank 1: no"}
    assert [list(heat.seconds) for heat in found.cell.heats] == [[who.FSDP], [who.HOOK_ELEMENTS]]


def test_what_is_nobodys_fault_ends_the_part(speaking: Speaking) -> None:
    speaking("say(at='the unsharded model'); say(failed='no', at='the unsharded model')")
    with pytest.raises(RankError, match="the unsharded model"):
        run()


def test_a_heat_that_does_not_fit_into_memory_is_left_out(
    speaking: Speaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubled(speaking, {})
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


def test_a_peak_is_that_of_the_worst_rank(speaking: Speaking) -> None:
    speaking("say(result=100 + rank)")
    given: Any = {"model": who.LAYERS_10, "ranks": 2, "size": "tiny"}
    found = sharded_parts.run_peak(**given, name=who.FSDP, tell=lambda _: None)
    assert (found.peaks, found.failed) == ([101], "")
    speaking("say(failed='no', at='x'); hang()")
    found = sharded_parts.run_peak(**given, name=who.FSDP, tell=lambda _: None)
    assert found.failed.endswith(": no")


def test_saving_that_fails_says_so(speaking: Speaking) -> None:
    speaking("say(failed='disk full', at='save'); hang()")
    given: Any = {"model": who.LAYERS_10, "ranks": 2, "size": "tiny", "rounds": 1}
    found = sharded_parts.run_saving(**given, tell=lambda _: None)
    assert "disk full" in found.failed and found.failed.startswith("save: rank ")
    assert found.seconds == {}
