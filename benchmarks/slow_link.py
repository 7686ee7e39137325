"""Slow network inside the kernel: ranks in network namespaces, connected by a bridge.

A process that waits for the end of its standard input holds each namespace. So the kernel removes
the namespaces, the links and the bridge when the benchmark ends, also after a crash. Nothing has a
name outside of the namespaces, and no setting of the machine changes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

INTERFACE = "slow0"
"""The name of a rank's side of its link."""
BRIDGE = "bridge"
HOLD = ("unshare", "--net", "sh", "-c", "echo; exec cat")
TOOLS = ("ip", "tc", "nsenter", "unshare")
COMMAND_SECONDS = 30.0


class NoLinkError(RuntimeError):
    """The network cannot be made on this machine; the text says why."""


class Link(NamedTuple):
    """Link between a rank and the bridge: its rate and its delay."""

    megabits: int = 100
    """Rate in each direction, in Mbit/s."""
    delay_milliseconds: int = 10
    """Delay of the messages that a rank sends."""


class Network(NamedTuple):
    """Network that exists."""

    within: list[list[str]]
    """Prefix of each rank's commands, which runs a command in the rank's namespace."""
    link: Link
    """The link as it is, without a delay if the kernel cannot delay."""
    no_delay: str
    """Reason for a missing delay; empty if there is a delay."""


@contextmanager
def slow_network(ranks: int, link: Link) -> Iterator[Network]:
    """Create the network, and remove it afterwards.

    Args:
        ranks: the number of ranks.
        link: the link of each rank.

    Raises:
        NoLinkError: the network cannot be made on this machine.
    """
    why = _why_not()
    if why:
        raise NoLinkError(why)
    with ExitStack() as stack:
        hub = _Namespace(stack)
        hub.run("ip", "link", "add", BRIDGE, "type", "bridge")
        hub.run("ip", "link", "set", "dev", BRIDGE, "up")
        each = [_Namespace(stack) for _ in range(ranks)]
        no_delay = ""
        for rank, one in enumerate(each):
            port = f"port{rank}"
            peer = ("peer", "name", INTERFACE, "netns", str(one.process))
            hub.run("ip", "link", "add", port, "type", "veth", *peer)
            hub.run("ip", "link", "set", "dev", port, "master", BRIDGE, "up")
            one.run("ip", "addr", "add", f"10.0.0.{rank + 1}/16", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                one.run("ip", "link", "set", "dev", interface, "up")
            hub.run(*_shaped(port, "root", link))
            no_delay = no_delay or _delayed(one, link)
            one.run(*_shaped(INTERFACE, "root" if no_delay else "parent 1:1", link))
        found = link._replace(delay_milliseconds=0) if no_delay else link
        yield Network([list(one.enter) for one in each], found, no_delay)


def _why_not() -> str:
    """Return the reason why namespaces cannot be made, without a trial; empty if none is found."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"there is no {', '.join(absent)} on this machine"
    return "" if os.geteuid() == 0 else "only root may make network namespaces"


def _shaped(interface: str, parent: str, link: Link) -> list[str]:
    """Return the command that limits the rate of the data that leaves an interface."""
    rate = ("rate", f"{link.megabits}mbit", "burst", "64kb", "latency", "100ms")
    return ["tc", "qdisc", "add", "dev", interface, *parent.split(), "tbf", *rate]


def _delayed(one: "_Namespace", link: Link) -> str:
    """Delay the data that leaves a rank's interface. Return the reason if the kernel cannot."""
    late = ("delay", f"{link.delay_milliseconds}ms", "limit", "10000")
    try:
        one.run("tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "netem", *late)
    except NoLinkError as error:
        return str(error)
    return ""


class _Namespace:
    """Network namespace, held by a process that does nothing."""

    def __init__(self, stack: ExitStack) -> None:
        holder = subprocess.Popen(
            HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        stack.callback(_let_go, holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise NoLinkError(f"unshare --net: {holder.stderr.read().strip()}")
        self.process = holder.pid
        self.enter: Sequence[str] = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")

    def run(self, *command: str) -> None:
        """Run a command in the namespace.

        Raises:
            NoLinkError: the command failed; the message has its output.
        """
        done = subprocess.run(
            [*self.enter, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise NoLinkError(f"{' '.join(command)}: {said}")


def _let_go(holder: subprocess.Popen[str]) -> None:
    holder.communicate()  # also closes its standard input
