"""Groups of a schedule: for each period, the ranks that average with this rank."""

import hashlib
import socket

import torch.distributed as dist

from hooks.averaging.schedule import AveragingSchedule
from sharding.transport.groups import device_of, new_subgroup, ranks_of, resolve_group
from sharding.transport.local_group import LocalGroup
from sharding.zero.collective import all_gather_bytes


def period_groups(schedule: AveragingSchedule, group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Return the group of this rank for each period of a schedule, shortest first. Collective.

    Consecutive ranks average together: with size 2, the first and second rank of the group, the
    third and fourth, and so on.

    Raises:
        ValueError: a size above that of the group, or a last size other than that of the group.
    """
    count = group.size()
    sizes = [count if size is None else size for _, size in schedule.levels]
    if sizes[-1] != count:
        raise ValueError(
            f"the last group size is {sizes[-1]}, but {count} ranks average: the longest period "
            "averages over all of them; let the size be that, or None"
        )
    return [group if size == count else _own_subgroup(group, size) for size in sizes]


def machine_group() -> dist.ProcessGroup:
    """Return the group of the ranks on this machine. All ranks must call this together."""
    world = resolve_group(None)
    name = hashlib.sha256(socket.gethostname().encode()).digest()
    names = all_gather_bytes(
        world, device_of(world), name, "compare the names of machines", len(name)
    )
    machines: dict[bytes, list[int]] = {}
    for rank, one in enumerate(names):
        machines.setdefault(one, []).append(rank)
    return _torch_group(list(machines.values()))


def _own_subgroup(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return the subgroup with this rank, after a split into parts of ``size`` ranks."""
    ranks = ranks_of(group)
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    own = next(part for part in parts if ranks[group.rank()] in part)
    if isinstance(group, LocalGroup) or len(ranks) < dist.get_world_size():
        return new_subgroup(group, own)
    return _torch_group(parts)


def _torch_group(parts: list[list[int]]) -> dist.ProcessGroup:
    """Return the group of this rank. Torch makes a group for each part, on all ranks."""
    found, _ = dist.new_subgroups_by_enumeration(parts)
    assert isinstance(found, dist.ProcessGroup), "this rank is a member of its own part"
    return found
