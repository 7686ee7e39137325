"""Means over the ranks of a group, in few messages, at once or in the background."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.compression import Compression
from sharding.transport import Range, Transport
from sharding.transport.groups import GroupRank, device_of, format_ranks, new_subgroup, ranks_of
from sharding.transport.work import StreamEvent
from sharding.zero.collective import all_gather_bytes
from sharding.zero.groups import Transports

DIGEST_BYTES = 8


PendingMean = Callable[[], list[Tensor]]
"""Function that waits for means, and returns them, each with the shape and dtype of its tensor.

It may be called several times. It raises ValueError if ranks passed different tensors, and nothing
was reduced; and TransportError, which names missing ranks.
"""


class RankMeans:
    """Means over the ranks of a group: ``(((x_0 + x_1) + x_2) + ...) / W``, in rank order.

    Tensors of one dtype and device are copied to one flat buffer, of which each rank sums a range.
    Sums are in rank order (see :attr:`~sharding.transport.Transport.rank_ordered`), so their bits
    do not depend on how the buffer is split. float16 and bfloat16 are summed in float32; float16 is
    divided before the sum, which might overflow.

    Args:
        group: the process group.
        bucket_bytes: the largest chunk into which the buffer is split; by default one chunk.
        background: True to compute means in a thread while the caller continues. This creates a
            group, so that the messages need no common order with others: all ranks must call the
            constructor at the same time.

    Raises:
        ValueError: this rank is not in the group.

    Example::

        >>> from sharding.transport.local import LocalWorld
        >>> def mean(group):
        ...     return RankMeans(group).launch([torch.tensor(1.0 + group.rank())])()
        >>> LocalWorld(2).run(mean)
        [[tensor(1.5000)], [tensor(1.5000)]]
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int | None = None,
        background: bool = False,
    ) -> None:
        self._group = new_subgroup(group, ranks_of(group)) if background else group
        self._worker = ThreadPoolExecutor(1, "functional_optim averaging") if background else None
        self._transports = Transports(self._group)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._bucket_bytes = bucket_bytes

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of tensors that this rank has sent, without headers."""
        return sum(transport.bytes_sent for transport in self._transports.values())

    @torch.no_grad()
    def launch(self, tensors: Sequence[Tensor], *, mark: object = None) -> PendingMean:
        """Start to compute the mean of each of these tensors, which are copied.

        Args:
            tensors: with the same shapes and dtypes on all ranks.
            mark: any object whose ``repr`` must be equal on all ranks.

        Raises:
            TypeError: a tensor whose dtype has no mean.
        """
        for index, tensor in enumerate(tensors):
            if not has_mean(tensor):
                raise TypeError(f"tensor {index} is of {tensor.dtype}, whose numbers have no mean")
        flats, views = flatten_copies(tensors)
        return self._start(views, partial(self._reduce, flats, digest_of(tensors, mark)))

    def launch_decoded(
        self, compression: Compression, payload: Tensor, out: Tensor, *, mark: object = None
    ) -> PendingMean:
        """Start to compute the mean of decoded payloads, ``(((D(p_0) + D(p_1)) + ...) / W``.

        ``p_r`` is the payload of rank ``r``, and ``D`` decodes it. All ranks gather all payloads,
        so all get the same bits. A rank sends its payload to ``W - 1`` ranks: fewer bytes than
        float32 if a payload has less than ``2 / W`` of its size.

        Args:
            compression: that encoded the payloads.
            payload: of this rank; of equal length on all ranks.
            out: 1-D, the result.
            mark: any object whose ``repr`` must be equal on all ranks.
        """
        digest = digest_of([payload, out], mark)
        return self._start([out], partial(self._gather, compression, payload, out, digest))

    def _start(self, views: list[Tensor], job: Callable[[], object]) -> PendingMean:
        """Return a mean whose job runs when it is waited for, or from now on in the background."""
        future: Future[StreamEvent] | None = None
        if self._worker is not None:
            device = next((one.device for one in views if one.is_cuda), torch.device("cpu"))
            future = self._worker.submit(partial(self._in_stream, job, device, StreamEvent(device)))

        @cache  # the job runs once
        def wait() -> list[Tensor]:
            if future is None:
                job()
            else:
                future.result().wait()
            return views

        return wait

    def _in_stream(
        self, job: Callable[[], object], device: torch.device, inputs: StreamEvent
    ) -> StreamEvent:
        """Run a job after its inputs, on an accelerator in a separate stream; return its event."""
        if device.type != "cuda":
            job()
            return StreamEvent(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            inputs.wait()
            job()
            return StreamEvent(device)

    @torch.no_grad()
    def _gather(
        self, compression: Compression, payload: Tensor, out: Tensor, digest: bytes
    ) -> None:
        transport = self._transports[payload.device]
        check_same_digest(self._group, digest, payload.device)
        count = payload.numel()
        ranges = [(count * rank, count * (rank + 1)) for rank in range(transport.size)]
        payloads = payload.new_empty(count * transport.size)
        payloads[slice(*ranges[transport.rank])] = payload
        transport.all_gather(payloads, ranges).wait()
        out.zero_()
        for one in payloads.view(transport.size, count):
            out += compression.decode(one, out.numel(), out.dtype)
        out /= transport.size

    @torch.no_grad()
    def _reduce(self, flats: Sequence[Tensor], digest: bytes) -> None:
        """Compute the means of these buffers, in place."""
        device = flats[0].device if flats else device_of(self._group)
        check_same_digest(self._group, digest, device)
        parts: list[tuple[Transport, Tensor, list[Range]]] = []
        for flat in flats:
            transport, bucket = self._transports[flat.device], self._bucket_bytes
            size = flat.numel() if bucket is None else max(1, bucket // flat.element_size())
            parts += [
                (transport, part, even_ranges(part.numel(), transport.size))
                for part in flat.split(size)
            ]
        works = [
            transport.reduce_scatter(part, ranges, average=is_divided_first(part.dtype))
            for transport, part, ranges in parts
        ]
        for work in works:
            work.wait()
        works = []
        for transport, part, ranges in parts:
            if not is_divided_first(part.dtype):
                part[slice(*ranges[transport.rank])].div_(transport.size)
            works.append(transport.all_gather(part, ranges))
        for work in works:
            work.wait()


def flatten_copies(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Copy tensors to a flat buffer per dtype and device; return buffers, and a view per tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    views = [tensor.detach() for tensor in tensors]  # empty tensors need no copy
    flats = []
    for (dtype, device), indices in kinds.items():
        sizes = [tensors[index].numel() for index in indices]
        flats.append(torch.empty(sum(sizes), dtype=dtype, device=device))
        for index, part in zip(indices, flats[-1].split(sizes), strict=True):
            views[index] = part.view(tensors[index].shape).copy_(tensors[index])
    return flats, views


def digest_of(tensors: Sequence[Tensor], mark: object = None) -> bytes:
    """Return a digest of everything that must be equal on all ranks."""
    kinds = [(tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for tensor in tensors]
    return hashlib.sha256(repr((kinds, mark)).encode()).digest()[:DIGEST_BYTES]


def checksum(tensor: Tensor) -> int:
    """Return the sum of a floating tensor's words, read as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    return int(real.detach().contiguous().view(words).sum(dtype=torch.int64))


def check_same_digest(group: dist.ProcessGroup, digest: bytes, device: torch.device) -> None:
    """Raise ValueError, with the names of ranks, unless all ranks of a group have this digest.

    Otherwise ranks that reduce different tensors would wait for one another forever.
    """
    digests = all_gather_bytes(group, device, digest, "compare what is averaged", DIGEST_BYTES)
    others = [GroupRank(rank) for rank, one in enumerate(digests) if one != digest]
    if others:
        raise ValueError(
            f"{format_ranks(group, others)} brought other tensors to average than this rank; "
            "all ranks must have the same parameters, of the same shapes and dtypes, the same "
            "tensors of state where that is averaged too, of DTensors the same shards (the process "
            "group is that of the dimension of a mesh over which they are replicated), and under "
            "an outer rule the same anchors (they begin as the parameters, which must be the same "
            "on all ranks)"
        )


def even_ranges(count: int, size: int) -> list[Range]:
    """Split ``count`` elements evenly among the ranks of a group."""
    cuts = [count * rank // size for rank in range(size + 1)]
    return list(pairwise(cuts))


def has_mean(tensor: Tensor) -> bool:
    """Return True if a tensor is floating or complex, so that its values have a mean."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_divided_first(dtype: torch.dtype) -> bool:
    """Return True if terms are divided before they are added, because their sum may overflow."""
    return dtype == torch.float16
