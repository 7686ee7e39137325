"""Threads as a transport; over RPC the same is tried in rpc/."""

import pytest
import torch

from functional_optim.remote import ThreadTransport

from .transports import WANTED, Shelf, tried


def test_threads_place_call_and_fail() -> None:
    transport = ThreadTransport()
    assert tried(transport, "one") == WANTED
    transport.close()
    with pytest.raises(RuntimeError, match="'one' is closed"):
        transport.place("one", Shelf, torch.ones(1))
