"""The groups of a schedule: for each of its periods, those ranks that average with this one."""

import hashlib
import socket
from collections.abc import Sequence

import torch.distributed as dist

from hooks.averaging.schedule import AveragingSchedule
from sharding.transport.groups import device_of, resolved, sub_group
from sharding.transport.local_group import LocalGroup
from sharding.transport.peers import ranks_of
from sharding.zero.collective import exchanged


def groups_of(schedule: AveragingSchedule, group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """The group of this rank for each period of a schedule, shortest first.

    Ranks next to one another average together: with size 2, the first and the second rank of the
    group, the third and the fourth, and so on. Collective.

    Args:
        schedule: its sizes.
        group: of all that average.

    Raises:
        ValueError: a size greater than the group, or a last one that is not its size.
    """
    count = group.size()
    sizes = [count if size is None else size for _, size in schedule.levels]
    if sizes[-1] != count:
        raise ValueError(
            f"the last group size is {sizes[-1]}, but {count} ranks average: the longest period "
            "averages over all of them; let the size be that, or None"
        )
    return [group if size == count else _own_part(group, size) for size in sizes]


def ranks_of_this_machine() -> dist.ProcessGroup:
    """The group of those ranks of the world that are on this machine. All ranks call it."""
    world = resolved(None)
    name = hashlib.sha256(socket.gethostname().encode()).digest()
    names = exchanged(world, device_of(world), name, "compare the names of machines", len(name))
    machines: dict[bytes, list[int]] = {}
    for rank, one in enumerate(names):
        machines.setdefault(one, []).append(rank)
    return _made_by_all(list(machines.values()), machines[name])


def _own_part(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return the part with this rank, of parts of ``size`` ranks each."""
    ranks = ranks_of(group)
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    own = next(part for part in parts if ranks[group.rank()] in part)
    if isinstance(group, LocalGroup) or len(ranks) < dist.get_world_size():
        return sub_group(group, own)
    return _made_by_all(parts, own)


def _made_by_all(parts: Sequence[list[int]], own: list[int]) -> dist.ProcessGroup:
    """Make sub-groups as torch does: every rank takes part in making every one."""
    made = [dist.new_group(part) for part in parts]
    found = made[list(parts).index(own)]
    assert isinstance(found, dist.ProcessGroup), "this rank is a member of its own part"
    return found
