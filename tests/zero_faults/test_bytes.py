"""Tests that an iteration sends the bytes of an all-reduce, as counted by the kernel.

The count is the difference of TCP_INFO of each connection before and after.
"""

import socket

import pytest

from benchmarks import sockets
from tests.ranks import Outcomes

from .jobs import CUT, ONE_HOST, UNCOUNTED
from .scenarios import PLAIN, STEP
from .sides import OURS, TORCH
from .table import ratio, total

pytestmark = pytest.mark.skipif(UNCOUNTED is not None, reason=str(UNCOUNTED))


def test_connections_that_are_closed_meanwhile_take_nothing_away() -> None:
    """The count stays right if an older connection closes during the measurement.

    The process group of an earlier job closes its connections only some seconds later.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        early, early_peer = socket.create_connection(server.getsockname()), server.accept()[0]
        early.sendall(bytes(5000))
        before = sockets.sent()
        with (
            socket.create_connection(server.getsockname()) as late,
            server.accept()[0] as late_peer,
        ):
            late.sendall(bytes(700))
            late_peer.recv(700, socket.MSG_WAITALL)
            late_peer.sendall(b"!")  # it carries the acknowledgement
            late.recv(1)
            early.close()
            early_peer.close()
            assert sockets.since(before) == 701


def test_the_kernel_counts_an_all_reduce(on_four: Outcomes) -> None:
    """Each of W ranks under DDP sends and receives 2 (W - 1) / W of the bytes of all gradients."""
    ranks = on_four[f"bytes, {PLAIN}"]
    expected = 2 * (len(ranks) - 1) * ranks[0].result()["numel"] * 4
    assert total(on_four, PLAIN) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["zero_step_hook", CUT])
def test_as_many_as_an_all_reduce(on_four: Outcomes, kind: str) -> None:
    assert ratio(on_four, kind) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("kind", "left"), [("zero_step_hook", 0.01), (OURS[1], 1.01)])
def test_what_goes_through_memory_is_not_sent(on_four: Outcomes, kind: str, left: float) -> None:
    """Our own data goes through shared memory, but an inner hook still sends its all-reduce."""
    assert ratio(on_four, f"{kind}, {ONE_HOST}") == pytest.approx(left, abs=0.01)


@pytest.mark.parametrize(
    "kind", [STEP, TORCH, "hook_with_zero_step", "hook_with_zero_step_interleaved"]
)
def test_half_as_many_again_where_all_gradients_go_to_all(on_four: Outcomes, kind: str) -> None:
    """torch's class sends 1.5 times the bytes of DDP, as does ours with an inner hook."""
    assert ratio(on_four, kind) == pytest.approx(1.5, abs=0.02)
