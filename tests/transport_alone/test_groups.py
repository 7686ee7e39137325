"""The device on which a group's collectives run, as its backends say it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hooks.averaging import levels
from sharding.transport import groups
from sharding.transport.groups import device_of, sub_group
from sharding.transport.local import LocalWorld
from tests.choices import case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

DEVICES = {
    "cuda:nccl": CUDA,
    "cpu:gloo,cuda:nccl": CPU,
    "cuda:nccl,cpu:gloo": CPU,
    "cpu:gloo,cuda:gloo": CPU,
    "cpu:gloo": CPU,
}
"""By what torch says of a group: where small numbers of its ranks are compared."""

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_device_is_one_that_the_group_has_a_backend_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 40: the name "nccl" alone was a backend for CUDA; "cuda:nccl" was not.

    torch's words for a group are replaced, and its collectives: this torch may lack NCCL.
    """
    asked: list[torch.device] = []

    def noting(*given: Any) -> Any:
        asked.extend(one for one in given if isinstance(one, torch.device))
        return nullcontext()

    def exchanged(_: Any, device: torch.device, data: bytes, *__: Any) -> list[bytes]:
        asked.append(device)
        return [data]

    world: Any = dist.group.WORLD
    for config, device in DEVICES.items():
        asked.clear()
        with case(config=config), monkeypatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda *_, config=config: config)
            patch.setattr(dist, "get_backend", lambda *_, config=config: config)
            assert device_of(world) == device
            patch.setattr(levels, "exchanged", exchanged)
            patch.setattr(levels, "_made_by_all", lambda *_: world)
            assert levels.ranks_of_this_machine() is world
            patch.setattr(groups, "_one_name", noting)
            patch.setattr(groups, "timeout_of", noting)
            patch.setattr(dist, "new_group", lambda *_, **__: world)
            patch.setattr(dist, "get_world_size", lambda *_: 2)
            assert sub_group(world, [0]) is world
            assert asked == [device] * 3


def test_device_of_groups_as_they_are() -> None:
    """Fault 40: groups that this torch can make."""
    assert device_of(LocalWorld(1).groups[0]) == CPU
    for backend in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
        with case(backend=backend):
            made: Any = dist.new_group([0], backend=backend)
            assert device_of(made) == CPU
