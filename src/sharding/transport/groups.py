"""Process groups: what a caller may give for one, and a group of their own for gathers."""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from functional_optim._torch import gloo_options, group_count
from sharding.transport.local_group import LocalGroup
from sharding.transport.peers import SPLIT_GROUPS, SplitGroup, ranks_of, timeout_of

_TWINS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_LAST_COUNT = [0]
"""The number in the name of the last sub-group that this process has made; it only rises."""


def resolved(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group meant.

    Raises:
        TypeError: something else.
        ValueError: a mesh of several dimensions, a group that this rank is not in, or no world.
    """
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


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """By device type, from torch's ``cpu:gloo,cuda:nccl``."""
    if isinstance(group, LocalGroup):
        return {"cpu": "local"}
    if group in SPLIT_GROUPS:
        return SPLIT_GROUPS[group].backends
    config = dist.get_backend_config(group)
    pairs = [part.partition(":") for part in config.split(",")]
    return {device: backend for device, _, backend in pairs}


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group's collectives take: the CPU where it has a backend.

    ``nccl``, ``cuda:nccl`` and ``cpu:mpi`` say it in different words, so torch's backend for each
    device counts, and not the name of the backend.
    """
    devices = list(backends(group))
    return torch.device("cpu" if "cpu" in devices else devices[0])


def has_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if tensors on a device are sent in messages that are waited for one by one.

    Where they do, errors name the rank that did not come.
    """
    return backends(group).get(device.type) in ("gloo", "local")


def gather_group(group: dist.ProcessGroup | DeviceMesh | None = None) -> dist.ProcessGroup:
    """A second process group of the same ranks, for what must not wait for the first one's order.

    Collectives of one group must leave in the same order on all ranks. Gathers of parameters leave
    when a step is done, reductions when backward comes to them: each gets a group of its own, so
    that the two orders do not depend on one another.

    Collective: all members of ``group`` call it, and nobody else. It is made once, and kept as long
    as ``group`` lives.

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
    members = resolved(group)
    known = _TWINS.get(members)
    if known is not None:
        return known
    ranks = ranks_of(members)
    if ranks != sorted(ranks):
        raise ValueError(
            f"the group's ranks are {ranks}; torch makes groups in ascending order only, so the "
            "twin would number them otherwise"
        )
    _TWINS[members] = twin = sub_group(members, ranks)
    return twin


def sub_group(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return a new group of some ranks of another, with its backends and timeout.

    Collective: all members of ``group`` call it, each with the ranks of the group that it is to be
    in, and nobody else. Over gloo the caller owns the group: torch's own list of groups does not
    have it, and ``destroy_process_group`` leaves it alone.

    Args:
        group: the group that is split.
        ranks: numbers in the world, in ascending order.

    Raises:
        RuntimeError: over another backend than gloo, ranks know different numbers of groups.
    """
    if isinstance(group, LocalGroup):
        return group.part(ranks)
    device = device_of(group)
    timeout = timeout_of(group, device)
    by_device = _one_device_of_each(backends(group))
    if set(by_device.values()) != {"gloo"}:
        return _new_group(group, ranks, timeout, device)
    members = ranks_of(group)
    part = group.split_group(
        [members.index(rank) for rank in ranks],
        timeout,
        # It writes to its options, and without any to those of the parent, which are in use.
        gloo_options(group, members, timeout),
        GroupName(f"{group.group_name}:{_agreed_count(group, device)}:{ranks}"),
        f"ranks {ranks} of {group.group_name}",
        [torch.device(one) for one in by_device],
    )
    assert isinstance(part, dist.ProcessGroup), "this rank is a member"
    SPLIT_GROUPS[part] = SplitGroup(list(ranks), by_device)
    # A rank is ready when its own connections are open, while another may still be opening one to
    # it: dropped by its owner now, the group would close that.
    _greatest(part, 0, device)
    return part


def _new_group(
    group: dist.ProcessGroup, ranks: list[int], timeout: timedelta, device: torch.device
) -> dist.ProcessGroup:
    """Return a new group of torch's own: NCCL splits only a group that is bound to a device.

    torch names a group that only its members make after its ranks and after the number of groups
    that the rank knows. Ranks that know different numbers would wait for one another in vain.

    Raises:
        RuntimeError: they do; names the way out.
    """
    part = len(ranks) < dist.get_world_size()
    count = group_count()
    if part and _greatest(group, count, device) != -_greatest(group, -count, device):
        raise RuntimeError(
            f"ranks {ranks_of(group)} know different numbers of process groups (this one {count}), "
            "and torch names a group of some ranks by that number: make as many groups on each of "
            "these ranks before, or use gloo"
        )
    made = dist.new_group(ranks, timeout, dist.get_backend(group), use_local_synchronization=part)
    assert isinstance(made, dist.ProcessGroup), "this rank is a member"
    return made


def _one_device_of_each(found: dict[str, str]) -> dict[str, str]:
    """Return the first device type of each backend, the CPU before all others.

    A group of "gloo" has this backend for the CPU and for CUDA. ``split_group`` would make it
    twice, under one name: ranks then connect some backend of one rank to the other of another.
    """
    chosen: dict[str, str] = {}
    for device in sorted(found, key=lambda one: one != "cpu"):
        chosen.setdefault(found[device], device)
    return {device: backend for backend, device in chosen.items()}


def _agreed_count(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return a number that no member of a group has had before. Collective.

    Ranks meet in a store under a name, and a store keeps what was written to it.
    """
    _LAST_COUNT[0] = _greatest(group, _LAST_COUNT[0] + 1, device)
    return _LAST_COUNT[0]


def _greatest(group: dist.ProcessGroup, number: int, device: torch.device) -> int:
    """Return the greatest number of any rank. Collective."""
    wanted = torch.tensor([number], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([wanted], options).wait()
    return int(wanted.item())
