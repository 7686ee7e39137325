"""Tests of the errors of messages that did not arrive."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from sharding.transport.groups import GroupRank
from sharding.transport.messages import Direction, PartMessage, wait_messages
from sharding.transport.protocol import TransportError
from tests.choices import case


class Work:
    """Message that does not arrive."""

    def __init__(self, says: str, seconds: float = 0.0) -> None:
        self._says, self._seconds = says, seconds

    def wait(self, timeout: timedelta) -> None:
        time.sleep(min(self._seconds, timeout.total_seconds()))
        raise RuntimeError(self._says)


def message(says: str) -> PartMessage:
    work: Any = Work(says)
    return PartMessage(Direction.FROM, GroupRank(0), 7, work)


@pytest.mark.usefixtures("world_of_one")
def test_the_first_of_two_whose_time_is_up_ends_the_other() -> None:
    """gloo then says that the application of the other rank timed out, but no rank is lost."""
    world: Any = dist.group.WORLD
    own = "[pair.cc:1] Timed out waiting 3000ms for recv operation to complete"
    beside = "[pair.cc:2] Application timeout caused pair closure"
    gone = "[pair.cc:3] Connection closed by peer [127.0.0.1]:1"
    for texts, said in (
        ((own, beside), "waited "),
        ((beside, own), "waited "),
        ((gone, own), "lost "),
        ((gone, beside), "lost "),
    ):
        with case(texts=texts), pytest.raises(TransportError) as error:
            wait_messages("all_gather 0", world, list(map(message, texts)))
        with case(texts=texts):
            assert str(error.value).startswith(
                f"all_gather 0: group rank 0 (global rank 0) of 1 ranks {said}"
            )
