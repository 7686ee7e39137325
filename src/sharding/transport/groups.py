"""Process groups: what a caller may give for one, and a group of their own for gathers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from functional_optim._torch import process_group_names
from sharding.transport.local_group import LocalGroup
from sharding.transport.peers import ranks_of, timeout_of

_TWINS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_LAST_COUNT = [0]
"""The number in the name of the last sub-group made here; it only rises."""


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
    """A new group of some ranks of another, with its backend and timeout.

    Collective: all members of ``group`` call it, each with the ranks of the group that it is to be
    in, and nobody else.

    Args:
        group: what it is made from.
        ranks: numbers in the world, in ascending order.
    """
    if isinstance(group, LocalGroup):
        return group.part(ranks)
    device = device_of(group)
    part = len(ranks) < dist.get_world_size()
    with _one_name(group, device) if part else nullcontext():
        twin = dist.new_group(
            ranks,
            timeout_of(group, device),
            dist.get_backend(group),
            use_local_synchronization=part,
            group_desc=f"gathers of {group.group_name}",
        )
    assert isinstance(twin, dist.ProcessGroup), "this rank is a member"
    return twin


@contextmanager
def _one_name(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """While this is open, all members give a new group one name, which no other has. Collective.

    torch names a group that only its members make after its ranks and after the number of groups
    that the rank knows. That number differs between ranks that are in different groups, and then
    they wait for one another under different names until the timeout; and it falls when a group is
    destroyed, so that a name may come again. Here it is the same for all, and only rises.
    """
    known = process_group_names()
    wanted = torch.tensor([max(len(known), _LAST_COUNT[0] + 1)], device=device)
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=group)
    _LAST_COUNT[0] = int(wanted.item())
    # Groups in their place would have names of that kind themselves, which may be taken.
    fillers = {object(): f"filler {n}" for n in range(len(known), _LAST_COUNT[0])}
    known.update(fillers)
    try:
        yield
    finally:
        for filler in fillers:
            del known[filler]
