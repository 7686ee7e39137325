"""The mean of one flat vector over ranks, each of which sends a compressed form of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.compression import Compression
from hooks.averaging.group_mean import PendingMean, check_alike, form_of
from sharding.transport import Transport, make_transport
from sharding.transport.groups import resolved, sub_group
from sharding.transport.peers import ranks_of


class CompressedMean:
    """Takes the mean of what ranks sent: ``(((D(p_0) + D(p_1)) + D(p_2)) + ...) / W``.

    ``p_r`` is the payload of rank ``r``, and ``D`` decodes it. Every rank has all payloads and adds
    them in rank order, so that all get the same bits. A rank sends its payload to each of the
    others, ``W - 1`` times: fewer bytes than float32 as long as a payload has less than ``2 / W``
    of its size.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the world.
        compression: how a vector is sent.
        background: whether a thread does it while the caller goes on; see
            :class:`~hooks.averaging.group_mean.GroupMean`.

    Example::

        >>> from hooks.averaging.compression import Blocks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mean = CompressedMean(None, Blocks(bits=8))
        >>> payload = mean.compression.encode(torch.tensor([1.27, -0.5]))
        >>> mean.launch(payload, torch.empty(2)).wait()
        [tensor([ 1.2700, -0.5000])]
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        compression: Compression,
        *,
        background: bool = False,
    ) -> None:
        self._group = resolved(group)
        self.compression = compression
        """How a vector is sent."""
        self._worker: ThreadPoolExecutor | None = None
        if background:
            self._group = sub_group(self._group, ranks_of(self._group))
            self._worker = ThreadPoolExecutor(1, "functional_optim averaging")
        self._transports: dict[torch.device, Transport] = {}

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent, headers not counted."""
        return sum(transport.bytes_sent for transport in self._transports.values())

    def launch(self, payload: Tensor, out: Tensor, *, mark: object = None) -> PendingMean:
        """Begin to take the mean.

        Args:
            payload: of this rank; as long on all ranks.
            out: of one dimension: the mean will be here.
            mark: anything else that ranks must have in common, by its ``repr``.
        """
        form = form_of([payload, out], mark)
        job: Callable[[], object] = partial(self._gather, payload, out, form)
        return PendingMean([out], job if self._worker is None else self._worker.submit(job).result)

    @torch.no_grad()
    def _gather(self, payload: Tensor, out: Tensor, form: bytes) -> None:
        if payload.device not in self._transports:
            self._transports[payload.device] = make_transport(self._group, payload.device)
        transport = self._transports[payload.device]
        check_alike(transport, form, payload.device)
        count = payload.numel()
        ranges = [(count * rank, count * (rank + 1)) for rank in range(transport.size)]
        payloads = payload.new_empty(count * transport.size)
        payloads[slice(*ranges[transport.rank])] = payload
        transport.all_gather(payloads, ranges).wait()
        mean_of_decoded(self.compression, payloads.view(transport.size, count), out)


def mean_of_decoded(compression: Compression, payloads: Tensor, out: Tensor) -> None:
    """``out = (((D(p_0) + D(p_1)) + D(p_2)) + ...) / W``, with ``p_r`` the rows of ``payloads``."""
    out.zero_()
    for payload in payloads:
        out += compression.decode(payload, out.numel(), out.dtype)
    out /= len(payloads)
