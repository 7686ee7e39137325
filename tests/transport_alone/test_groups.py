"""Tests of the device on which the collectives of a group run, according to its backends."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hooks.averaging import period_groups
from sharding.transport import groups
from sharding.transport.groups import GroupRank, device_of, global_rank, new_subgroup, ranks_of
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
"""Device on which ranks compare small numbers, by torch's description of a group."""


class EndError(Exception):
    """End of the construction of a group, since this torch may lack its backend."""


pytestmark = pytest.mark.usefixtures("world_of_one")


def test_device_is_one_that_the_group_has_a_backend_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 40: the name "nccl" was a backend for CUDA, but "cuda:nccl" was not.

    The test replaces torch's description and collectives of a group, since this torch may lack
    NCCL.
    """
    asked: list[torch.device] = []

    def timeout(_: Any, device: torch.device) -> timedelta:
        asked.append(device)
        return timedelta(seconds=1)

    def greatest(_: Any, __: int, device: torch.device) -> int:
        asked.append(device)
        raise EndError

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
            patch.setattr(period_groups, "all_gather_bytes", exchanged)
            patch.setattr(period_groups, "_torch_group", lambda *_: world)
            assert period_groups.machine_group() is world
            patch.setattr(groups, "_all_reduce_max", greatest)
            patch.setattr(groups, "timeout_of", timeout)
            patch.setattr(dist, "get_world_size", lambda *_: 2)
            with pytest.raises(EndError):
                new_subgroup(world, [0])
            assert asked == [device] * 3


def test_device_of_groups_as_they_are() -> None:
    """Fault 40: the device is right for real groups that this torch can make."""
    assert device_of(LocalWorld(1).groups[0]) == CPU
    for backend in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
        with case(backend=backend):
            made: Any = dist.new_group([0], backend=backend)
            assert device_of(made) == CPU


def test_a_part_has_each_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """split_group would make a backend for two device types twice, under one name."""
    for config, expected in {
        "cpu:gloo,cuda:gloo": {"cpu": "gloo"},
        "cuda:gloo,cpu:gloo": {"cpu": "gloo"},
        "cuda:nccl,cpu:gloo": {"cpu": "gloo", "cuda": "nccl"},
        "cuda:nccl": {"cuda": "nccl"},
    }.items():
        with case(config=config), monkeypatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda *_, config=config: config)
            found = groups._device_of_each_backend(groups.backends_of(dist.group.WORLD))
            assert found == expected


def test_a_part_of_a_part_over_and_over() -> None:
    """torch 2.13 reads the ranks of the world from an empty list, so nested parts need care."""
    part: Any = dist.group.WORLD
    names = set()
    for _ in range(5):
        part = new_subgroup(part, [0])
        total = torch.ones(2)
        dist.all_reduce(total, group=part)
        assert total.tolist() == [1.0, 1.0]
        assert groups.backends_of(part) == {"cpu": "gloo"}
        assert ranks_of(part) == [0] and global_rank(part, GroupRank(0)) == 0
        names.add(part.group_name)
    assert len(names) == 5
