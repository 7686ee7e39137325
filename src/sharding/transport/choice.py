"""Choice of a transport for the backend of a process group."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sharding.transport.gloo import GlooTransport
from sharding.transport.groups import backends_of, resolve_group
from sharding.transport.local import LocalTransport
from sharding.transport.local_group import LocalGroup
from sharding.transport.nccl import NcclTransport
from sharding.transport.protocol import Transport
from sharding.transport.shared_memory import SharedMemoryTransport


def make_transport(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    *,
    in_flight: int = 4,
) -> Transport:
    """Return a transport for tensors on a device, over a process group.

    All ranks of the group must make their transports in the same order.

    Args:
        group: a process group that this rank is a member of, or a DeviceMesh of one dimension; by
            default the world.
        device: of the tensors.
        in_flight: over the network between CPUs, the largest number of pending reduce_scatters;
            each needs memory.

    Returns:
        A :class:`~sharding.transport.SharedMemoryTransport` around a
        :class:`~sharding.transport.GlooTransport`, a
        :class:`~sharding.transport.NcclTransport`, or, in a world of threads, a
        :class:`~sharding.transport.local.LocalTransport`.

    Raises:
        ValueError: this rank is not in the group; a mesh of more dimensions; no transport for this
            backend and device.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> transport = make_transport()
        >>> flat = torch.tensor([1.0, 2.0, 3.0])
        >>> transport.all_gather(flat, [(0, 3)]).wait()
        >>> flat
        tensor([1., 2., 3.])
        >>> dist.destroy_process_group()
    """
    members = resolve_group(group)
    kind = torch.device(device).type
    if isinstance(members, LocalGroup) and kind == "cpu":
        return LocalTransport(members)
    backend = backends_of(members).get(kind)
    if (kind, backend) == ("cpu", "gloo"):
        return SharedMemoryTransport(GlooTransport(members, in_flight=in_flight))
    if (kind, backend) == ("cuda", "nccl"):
        return NcclTransport(members)
    raise ValueError(
        f"there is no transport for {kind} tensors over {backend or 'no backend'} (this group has "
        f"{backends_of(members)}); there is one for cpu over gloo and for cuda over "
        "nccl: init_process_group('cpu:gloo,cuda:nccl') gives a group both"
    )
