"""Training over a slow link: the network, the ranks, and the report."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import averaging as who
from benchmarks import averaging_race, slow_link, sockets
from benchmarks.averaging_picture import draw_averaging
from benchmarks.command import bench
from benchmarks.publish import page
from benchmarks.records import Report
from benchmarks.sharded_launch import LaunchSettings, run_ranks
from benchmarks.sharded_models import DEMO, TASKS, numel
from benchmarks.slow_link import INTERFACE, Link, Network, NoLinkError, slow_network
from benchmarks.tables import details
from hooks.demo import text
from tests.choices import case

from .conftest import PATIENCE
from .reports import raced, report

# ------------------------------------------------------------------------------------ the network


NETEM = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "netem")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Record the process of each namespace and its commands, instead of making namespaces."""
    made: list[tuple[int, tuple[str, ...]]] = []
    monkeypatch.setattr(slow_link.sys, "platform", "linux")
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 0)
    monkeypatch.setattr(slow_link, "HOLD", ("sh", "-c", "echo; exec cat"))
    monkeypatch.setattr(
        slow_link._Namespace, "run", lambda own, *command: made.append((own.process, command))
    )
    return made


def is_running(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def require_running(network: Network, hub: int, ranks: list[int]) -> None:
    """Check that each rank enters its own namespace, whose holder runs; then raise KeyError."""
    assert (network.link, network.no_delay) == (Link(20, 30), "")
    assert network.within == [["nsenter", f"--net=/proc/{rank}/ns/net"] for rank in ranks]
    assert all(map(is_running, (hub, *ranks)))
    raise KeyError("on purpose")


def test_each_rank_has_a_slow_link_until_the_block_ends(
    commands: list[tuple[int, tuple[str, ...]]],
) -> None:
    """Both directions are slow, and an error in the block ends the holders of all namespaces."""

    def holders() -> list[int]:
        return list(dict.fromkeys(process for process, _ in commands))

    with pytest.raises(KeyError), slow_network(2, Link(20, 30)) as network:
        require_running(network, holders()[0], holders()[1:])
    hub, *ranks = holders()
    assert len(ranks) == 2
    assert not any(map(is_running, (hub, *ranks)))
    rate = ("tbf", "rate", "20mbit", "burst", "64kb", "latency", "100ms")
    for number, rank in enumerate(ranks):
        own = [command for process, command in commands if process == rank]
        port = f"port{number}"
        with case(rank=number):
            assert ("ip", "addr", "add", f"10.0.0.{number + 1}/16", "dev", INTERFACE) in own
            assert own[-2:] == [
                (*NETEM, "delay", "30ms", "limit", "10000"),
                ("tc", "qdisc", "add", "dev", INTERFACE, "parent", "1:1", *rate),
            ]
            assert (hub, ("tc", "qdisc", "add", "dev", port, "root", *rate)) in commands


def test_a_kernel_that_cannot_delay_limits_the_rate_alone(
    commands: list[tuple[int, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = slow_link._Namespace.run

    def run(own: slow_link._Namespace, *command: str) -> None:
        record(own, *command)
        if command[: len(NETEM)] == NETEM:
            raise NoLinkError("no netem")

    monkeypatch.setattr(slow_link._Namespace, "run", run)
    with slow_network(1, Link(20, 30)) as network:
        assert (network.link, network.no_delay) == (Link(20, 0), "no netem")
    assert commands[-1][1][:6] == ("tc", "qdisc", "add", "dev", INTERFACE, "root")


def look_and_fail(network: Network, seen: list[tuple[Network, str]]) -> None:
    command = [*network.within[1], "ip", "-brief", "addr"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen.append((network, shown))
    raise KeyError("on purpose")


def is_possible() -> bool:
    """Return True if this machine can make what a slow network consists of."""
    script = (
        "ip link add bridge0 type bridge && ip link add port0 type veth peer name slow0 && "
        "tc qdisc add dev port0 root tbf rate 1mbit burst 64kb latency 100ms"
    )
    command = ["unshare", "--net", "sh", "-c", script]
    missing = bool(slow_link._why_not())
    return not missing and subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_network_goes_with_whoever_made_it() -> None:
    """An error in the block removes the namespaces of the network.

    A machine that refuses one of its parts refuses the network.
    """
    seen: list[tuple[Network, str]] = []
    expected = KeyError if is_possible() else NoLinkError
    with pytest.raises(expected), slow_network(2, Link(megabits=20)) as network:
        look_and_fail(network, seen)
    assert len(seen) == (expected is KeyError)
    for network, shown in seen:
        assert INTERFACE in shown and "10.0.0.2/16" in shown and "port" not in shown
        assert network.link.megabits == 20
        assert (network.link.delay_milliseconds == 0) == bool(network.no_delay)
        for enter in network.within:
            assert not Path(enter[1].removeprefix("--net=")).exists()


def test_where_there_can_be_no_network_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = ("sh", "-c", "echo not permitted >&2; exit 1")
    for target, name, value, said in (
        (slow_link.sys, "platform", "darwin", "namespaces are Linux's, and this is darwin"),
        (slow_link.shutil, "which", lambda tool: None, "there is no ip, tc, nsenter, unshare on"),
        (slow_link.os, "geteuid", lambda: 1000, "only root may make network namespaces"),
        (slow_link, "HOLD", failing, "unshare --net: not permitted"),
    ):
        with case(name=name), monkeypatch.context() as patch:
            if name in ("geteuid", "HOLD"):
                patch.setattr(slow_link.sys, "platform", "linux")
                patch.setattr(slow_link.shutil, "which", lambda tool: tool)
            if name == "HOLD":
                patch.setattr(slow_link.os, "geteuid", lambda: 0)
            patch.setattr(target, name, value)
            with pytest.raises(NoLinkError, match=said), slow_network(1, Link()):
                pass
            found = averaging_race.run_races(size="tiny", names=list(who.RACERS), tell=print)
            assert said in found["skipped"]


# ----------------------------------------------------------------------------------------- ranks


def test_who_counts_parameters_leaves_the_text_where_it_is() -> None:
    """Counting the parameters leaves the cached text on the CPU.

    The text is cached for all callers, and the first caller may build the model on the device meta.
    """
    text.corpus.cache_clear()
    assert numel(DEMO, "tiny") == sum(p.numel() for p in TASKS[DEMO]["tiny"].model().parameters())
    assert text.corpus().train.device.type == "cpu"


def test_ranks_run_where_they_are_put(speaking: Callable[[str], None]) -> None:
    speaking("say(result=[os.environ['A'], os.environ['B']])")
    places = LaunchSettings({"A": "a"}, [["env", "B=0"], ["env", "B=1"]])
    found = run_ranks("race", DEMO, "tiny", 2, {}, limit_seconds=PATIENCE, places=places)
    assert found == [["a", "0"], ["a", "1"]]


@pytest.mark.usefixtures("parts_here")
def test_the_section_from_end_to_end(
    speaking: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def network(ranks: int, link: Link) -> Iterator[Network]:
        yield Network([["env"]] * ranks, link, "no netem")

    monkeypatch.setattr(averaging_race, "slow_network", network)
    monkeypatch.setattr(sockets, "uncounted", lambda: None)
    speaking(
        "names = order['given']['names']\n"
        "link = {'found_megabits': 98.0, 'round_trip_milliseconds': 0.5}\n"
        "one = {'steps': 3, 'samples': 96, 'curve': [[0.0, 4.5], [0.1, 4.0]]}\n"
        "race = {'link': link, 'racers': [one] * len(names)}\n"
        "say(at='x'); say(result=race if order['job'] == 'race' else [7] * len(names))"
    )
    options = ["--size=tiny", "--rounds=2", "--section=averaging", f"--output={tmp_path}"]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 0, result.output
    found = Report.load(tmp_path / "bench.json")
    assert found.failed == {} and found.skipped == {}
    assert [one.way for one in found.averaging_sent] == list(who.WAYS)
    assert [one.way for one in found.averaging_races] == list(who.RACERS)
    for one in found.averaging_races:
        with case(way=one.way):
            assert (one.no_delay, one.found_megabits) == ("no netem", 98.0)
            assert (one.steps, one.samples, one.curve) == (3, 96, [[0.0, 4.5], [0.1, 4.0]])
    assert all(one.sent_bytes == [7] * who.RANKS for one in found.averaging_sent)
    assert (tmp_path / "bench-averaging.png").exists()


# -------------------------------------------------------------------------------------- the report


def test_tables_have_who_was_trained(tmp_path: Path) -> None:
    found = report()
    found.averaging_races[1] = raced("post-local SGD, H = 16", samples=1000)
    shown = details(found)
    assert "| DDP | 200 | 1.00 | 3.000 | 1.5 s |" in shown
    assert "| post-local SGD, H = 16 | 500 | 2.50 | 3.000 | 1.5 s |" in shown
    assert "100 Mbit/s in each direction and is delayed by 10 ms." in shown
    late = replace(found.averaging_races[0], no_delay="tc: unknown")
    shown = details(replace(found, averaging_races=[late]))
    assert "not delayed, as this kernel cannot (`tc: unknown`)" in shown
    assert "benchmarks-averaging.png" in page(found)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw_averaging(report(), tmp_path / "new" / "averaging.png")
    assert (tmp_path / "new" / "averaging.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="over a slow link, got none"):
        draw_averaging(replace(report(), averaging_races=[]), tmp_path / "none.png")
