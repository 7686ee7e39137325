"""A channel: how means reach the other ranks, at once or in the background."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sharding.transport import Transport, make_transport
from sharding.transport.groups import resolved, sub_group
from sharding.transport.peers import ranks_of


class PendingMean:
    """A mean that is on its way.

    Args:
        views: where it will be, one for each tensor.
        job: that brings it, unless it is already being done in another thread.
    """

    def __init__(self, views: list[Tensor], job: Callable[[], object]) -> None:
        self._views, self._job = views, job

    def wait(self) -> list[Tensor]:
        """The means, each of the shape and dtype of its tensor, once they are there.

        Raises:
            ValueError: ranks that brought other tensors; nothing was reduced.
            TransportError: names the ranks that did not come.
        """
        self._job()
        self._job = _nothing
        return self._views


class Channel:
    """Transports over a group, one for each device, and perhaps a thread that uses them.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the world.
        background: whether a thread takes means while the caller goes on. All ranks of the group
            must then make this at the same time, as it makes a group of its own: what else is sent
            meanwhile has its own order.

    Raises:
        ValueError: this rank is not in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh | None, *, background: bool = False
    ) -> None:
        self._group = resolved(group)
        self._worker: ThreadPoolExecutor | None = None
        if background:
            self._group = sub_group(self._group, ranks_of(self._group))
            self._worker = ThreadPoolExecutor(1, "functional_optim averaging")
        self._transports: dict[torch.device, Transport] = {}

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent, headers not counted."""
        return sum(transport.bytes_sent for transport in self._transports.values())

    def transport(self, device: torch.device) -> Transport:
        """For tensors on a device."""
        if device not in self._transports:
            self._transports[device] = make_transport(self._group, device)
        return self._transports[device]

    def begun(self, views: list[Tensor], job: Callable[[], object]) -> PendingMean:
        """A mean that a job brings: when it is waited for, or from now on in the background."""
        if self._worker is None:
            return PendingMean(views, job)
        return PendingMean(views, self._worker.submit(job).result)


def _nothing() -> None:
    """What is left to do of a mean that is there."""
