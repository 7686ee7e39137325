"""Process groups: ranks and timeouts, new subgroups, and a second group for gathers."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NewType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from functional_optim._torch import distributed
from functional_optim._torch.distributed import gloo_options, group_count
from sharding.transport.local_group import LocalGroup

GroupRank = NewType("GroupRank", int)
"""Rank of a process in a process group."""
GlobalRank = NewType("GlobalRank", int)
"""Rank of a process in the world."""


_SPLIT_GROUPS: WeakKeyDictionary[dist.ProcessGroup, tuple[list[int], dict[str, str]]] = (
    WeakKeyDictionary()
)
"""Global ranks, and backends by device type, of all live groups that were split here, because torch
does not register them."""
_TWINS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_LAST_COUNT = [0]
"""The number in the name of the last subgroup that this process has made. It only increases."""


def global_rank(group: dist.ProcessGroup, rank: GroupRank) -> GlobalRank:
    """Return the global rank of a group rank."""
    return GlobalRank(ranks_of(group)[rank])


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of a group, in the order of group ranks."""
    if isinstance(group, LocalGroup):
        return list(group.ranks)
    if group in _SPLIT_GROUPS:
        return list(_SPLIT_GROUPS[group][0])
    return dist.get_process_group_ranks(group)


def format_ranks(group: dist.ProcessGroup, ranks: Sequence[GroupRank]) -> str:
    """Return ranks as errors name them: ``group rank 1 (global rank 3)``."""
    return ", ".join(
        f"group rank {rank} (global rank {global_rank(group, rank)})" for rank in ranks
    )


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long an operation waits for other ranks before it is an error."""
    if isinstance(group, LocalGroup):
        return timedelta(seconds=group.world.seconds)
    return distributed.timeout_of(group, device)


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the process group of an argument: of a mesh, or the world for None."""
    if group is None:
        if not dist.is_initialized():
            raise ValueError("there is no process group yet: call init_process_group first")
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a transport runs along one dimension, the mesh has {group.ndim}: {group}; take "
                "one of them, as in mesh['dp']"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not a member of the group; only its members may call")
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}"
        )
    return group


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends by device type, from torch's text such as ``cpu:gloo,cuda:nccl``."""
    if isinstance(group, LocalGroup):
        return {"cpu": "local"}
    if group in _SPLIT_GROUPS:
        return _SPLIT_GROUPS[group][1]
    config = dist.get_backend_config(group)
    pairs = [part.partition(":") for part in config.split(",")]
    return {device: backend for device, _, backend in pairs}


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group's collectives accept, the CPU if it has a backend.

    The backend of each device is looked up, because the same backend has several names, such as
    ``nccl`` and ``cuda:nccl``.
    """
    devices = list(backends_of(group))
    return torch.device("cpu" if "cpu" in devices else devices[0])


def has_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the backend of a device waits for each message separately.

    Errors can then name the rank that did not come.
    """
    return backends_of(group).get(device.type) in ("gloo", "local")


def gather_group(group: dist.ProcessGroup | DeviceMesh | None = None) -> dist.ProcessGroup:
    """Return a second process group of the same ranks, whose collectives have their own order.

    All ranks must launch the collectives of a group in the same order. Gathers of parameters are
    launched at the end of a step, and reductions during backward. With one group for each, the two
    orders are independent.

    Collective: all members of ``group`` must call this function, and no other rank. The second
    group is made once, and lives as long as ``group``.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the world.

    Returns:
        A group with the same ranks in the same order, the same backend and timeout.

    Raises:
        ValueError: this rank is not in the group, or its ranks are not in ascending order.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> twin = gather_group()
        >>> twin is gather_group(), twin is dist.group.WORLD
        (True, False)
        >>> dist.destroy_process_group()
    """
    members = resolve_group(group)
    known = _TWINS.get(members)
    if known is not None:
        return known
    ranks = ranks_of(members)
    if ranks != sorted(ranks):
        raise ValueError(
            f"the group's ranks are {ranks}; torch makes groups in ascending order only, so the "
            "twin would number them otherwise"
        )
    _TWINS[members] = twin = new_subgroup(members, ranks)
    return twin


def new_subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return a new group of some ranks of another group, with the same backends and timeout.

    Collective: all members of ``group`` must call this function, and no other rank. Each passes the
    ranks of its own new group. Over gloo the caller owns the group: torch does not register it, and
    ``destroy_process_group`` does not destroy it.

    Args:
        group: the group that is split.
        ranks: global ranks, in ascending order.

    Raises:
        RuntimeError: the backend is not gloo, and ranks have made different numbers of groups.
    """
    if isinstance(group, LocalGroup):
        return group.split(ranks)
    device = device_of(group)
    timeout = timeout_of(group, device)
    by_device = _device_of_each_backend(backends_of(group))
    if set(by_device.values()) != {"gloo"}:
        return _new_group(group, ranks, timeout, device)
    members = ranks_of(group)
    part = group.split_group(
        [members.index(rank) for rank in ranks],
        timeout,
        # split_group writes to its options; by default these are the parent's, which are in use.
        gloo_options(group, members, timeout),
        GroupName(f"{group.group_name}:{_next_subgroup_number(group, device)}:{ranks}"),
        f"ranks {ranks} of {group.group_name}",
        [torch.device(one) for one in by_device],
    )
    assert isinstance(part, dist.ProcessGroup), "this rank is a member"
    _SPLIT_GROUPS[part] = list(ranks), by_device
    # The collective is a barrier: a rank returns from split_group while another rank may still be
    # connecting to it. If the caller dropped the group now, that connection would be closed.
    _all_reduce_max(part, 0, device)
    return part


def _new_group(
    group: dist.ProcessGroup, ranks: list[int], timeout: timedelta, device: torch.device
) -> dist.ProcessGroup:
    """Return a group from ``dist.new_group``, because NCCL only splits groups bound to a device.

    If only the members make a group, torch names it by its ranks and the number of groups that the
    rank has made. With different numbers, the ranks would wait for one another until the timeout.
    """
    part = len(ranks) < dist.get_world_size()
    count = group_count()
    if part and _all_reduce_max(group, count, device) != -_all_reduce_max(group, -count, device):
        raise RuntimeError(
            f"ranks {ranks_of(group)} know different numbers of process groups (this one {count}), "
            "and torch names a group of some ranks by that number: make as many groups on each of "
            "these ranks before, or use gloo"
        )
    new = dist.new_group(ranks, timeout, dist.get_backend(group), use_local_synchronization=part)
    assert isinstance(new, dist.ProcessGroup), "this rank is a member"
    return new


def _device_of_each_backend(found: dict[str, str]) -> dict[str, str]:
    """Return one device type for each backend, the CPU if it has that backend.

    A group of "gloo" has this backend for the CPU and for CUDA. For both, ``split_group`` would
    make two backends under one name, and might connect different ones of two ranks.
    """
    chosen: dict[str, str] = {}
    for device in sorted(found, key=lambda one: one != "cpu"):
        chosen.setdefault(found[device], device)
    return {device: backend for backend, device in chosen.items()}


def _next_subgroup_number(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return a number that no member of a group has used before. Collective.

    Ranks connect through keys of a store that contain the group's name, and keys are never deleted.
    """
    _LAST_COUNT[0] = _all_reduce_max(group, _LAST_COUNT[0] + 1, device)
    return _LAST_COUNT[0]


def _all_reduce_max(group: dist.ProcessGroup, number: int, device: torch.device) -> int:
    """Return the largest number of all ranks. Collective."""
    largest = torch.tensor([number], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([largest], options).wait()
    return int(largest.item())
