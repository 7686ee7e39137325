"""The mean of one flat vector over ranks, each of which sends a compressed form of its own."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.channel import Channel, PendingMean
from hooks.averaging.compression import Compression
from hooks.averaging.group_mean import check_alike, form_of


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
            :class:`~hooks.averaging.channel.Channel`.

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
        self._channel = Channel(group, background=background)
        self.compression = compression
        """How a vector is sent."""

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent, headers not counted."""
        return self._channel.bytes_sent

    def launch(self, payload: Tensor, out: Tensor, *, mark: object = None) -> PendingMean:
        """Begin to take the mean.

        Args:
            payload: of this rank; as long on all ranks.
            out: of one dimension: the mean will be here.
            mark: anything else that ranks must have in common, by its ``repr``.
        """
        form = form_of([payload, out], mark)
        return self._channel.begun([out], partial(self._gather, payload, out, form))

    @torch.no_grad()
    def _gather(self, payload: Tensor, out: Tensor, form: bytes) -> None:
        transport = self._channel.transport(payload.device)
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
