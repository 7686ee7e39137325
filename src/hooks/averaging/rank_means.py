"""Means over the ranks of a group, in as few messages as can be, at once or in the background."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.compression import Compression
from sharding.transport import Range, Transport, Work, make_transport
from sharding.transport.groups import device_of, sub_group
from sharding.transport.peers import GroupRank, named, ranks_of
from sharding.transport.works import Queued
from sharding.zero.collective import exchanged

DIGEST_BYTES = 8


class PendingMean:
    """A mean that is on its way.

    Args:
        views: where it will be, one for each tensor.
        job: that brings it; None where it is there.
    """

    def __init__(self, views: list[Tensor], job: Callable[[], object] | None = None) -> None:
        self._views, self._job = views, job

    def wait(self) -> list[Tensor]:
        """The means, each of the shape and dtype of its tensor, once they are there.

        Raises:
            ValueError: ranks that brought other tensors; nothing was reduced.
            TransportError: names the ranks that did not come.
        """
        if self._job is not None:
            self._job()
            self._job = None
        return self._views


class RankMeans:
    """Takes means over the ranks of a group: ``(((x_0 + x_1) + x_2) + ...) / W``, in rank order.

    Tensors of one dtype and device travel as one flat buffer, of which each rank sums a share. As
    sums are in rank order (see :attr:`~sharding.transport.Transport.rank_ordered`), their bits do
    not depend on how the buffer is cut. float16 and bfloat16 are summed in float32; float16 is
    divided before, as its largest number is small.

    Args:
        group: the process group.
        bucket_bytes: the buffer is cut into chunks of at most so many bytes; by default, not.
        background: whether a thread takes means while the caller goes on. All ranks of the group
            must then make this at the same time, as it makes a group of its own: what else is sent
            meanwhile has its own order.

    Raises:
        ValueError: this rank is not in the group.

    Example::

        >>> from sharding.transport.local import LocalWorld
        >>> def mean(group):
        ...     return RankMeans(group).launch([torch.tensor(1.0 + group.rank())]).wait()
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
        self._group = sub_group(group, ranks_of(group)) if background else group
        self._worker = ThreadPoolExecutor(1, "functional_optim averaging") if background else None
        self._transports: dict[torch.device, Transport] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._bucket_bytes = bucket_bytes

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent, headers not counted."""
        return sum(transport.bytes_sent for transport in self._transports.values())

    @torch.no_grad()
    def launch(self, tensors: Sequence[Tensor], *, mark: object = None) -> PendingMean:
        """Begin to take the mean of each of these tensors, which are copied.

        Args:
            tensors: as many, of the same shapes and dtypes, on all ranks.
            mark: anything else that ranks must have in common, by its ``repr``.

        Raises:
            TypeError: a tensor whose numbers have no mean.
        """
        check_has_mean(tensors)
        flats, views = coalesced(tensors)
        return self._begun(views, partial(self._reduce, flats, digest_of(tensors, mark)))

    def launch_decoded(
        self, compression: Compression, payload: Tensor, out: Tensor, *, mark: object = None
    ) -> PendingMean:
        """Begin to take the mean of what ranks send, ``(((D(p_0) + D(p_1)) + ...) / W``.

        ``p_r`` is the payload of rank ``r``, and ``D`` decodes it. Every rank has all payloads, so
        that all get the same bits. A rank sends its payload to each of the others, ``W - 1`` times:
        fewer bytes than float32 as long as a payload has less than ``2 / W`` of its size.

        Args:
            compression: that made the payloads.
            payload: of this rank; as long on all ranks.
            out: of one dimension: the mean will be here.
            mark: anything else that ranks must have in common, by its ``repr``.
        """
        digest = digest_of([payload, out], mark)
        return self._begun([out], partial(self._gather, compression, payload, out, digest))

    def _begun(self, views: list[Tensor], job: Callable[[], object]) -> PendingMean:
        """A mean that a job brings: when it is waited for, or from now on in the background."""
        if self._worker is None:
            return PendingMean(views, job)
        device = next((one.device for one in views if one.is_cuda), torch.device("cpu"))
        begun = self._worker.submit(partial(self._in_stream, job, device, Queued(device)))
        return PendingMean(views, lambda: begun.result().wait())

    def _in_stream(self, job: Callable[[], object], device: torch.device, given: Queued) -> Queued:
        """Do a job; on an accelerator in a stream of its own, after what it was given is there.

        Returns:
            What it has queued, for the streams of those that take the mean.
        """
        if device.type != "cuda":
            job()
            return Queued(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            given.wait()
            job()
            return Queued(device)

    def _transport(self, device: torch.device) -> Transport:
        if device not in self._transports:
            self._transports[device] = make_transport(self._group, device)
        return self._transports[device]

    @torch.no_grad()
    def _gather(
        self, compression: Compression, payload: Tensor, out: Tensor, digest: bytes
    ) -> None:
        transport = self._transport(payload.device)
        check_agreed(self._group, digest, payload.device)
        count = payload.numel()
        ranges = [(count * rank, count * (rank + 1)) for rank in range(transport.size)]
        payloads = payload.new_empty(count * transport.size)
        payloads[slice(*ranges[transport.rank])] = payload
        transport.all_gather(payloads, ranges).wait()
        mean_of_decoded(compression, payloads.view(transport.size, count), out)

    @torch.no_grad()
    def _reduce(self, flats: Sequence[Tensor], digest: bytes) -> None:
        """Take the means of these buffers, in place."""
        device = flats[0].device if flats else device_of(self._group)
        check_agreed(self._group, digest, device)
        parts = [part for flat in flats for part in self._cut(flat)]
        for work in [self._summed(part) for part in parts]:
            work.wait()
        works = []
        for part in parts:
            transport = self._transport(part.device)
            ranges = even_ranges(part.numel(), transport.size)
            if not divides_before(part.dtype):
                part[slice(*ranges[transport.rank])].div_(transport.size)
            works.append(transport.all_gather(part, ranges))
        for work in works:
            work.wait()

    def _summed(self, part: Tensor) -> Work:
        transport = self._transport(part.device)
        ranges = even_ranges(part.numel(), transport.size)
        return transport.reduce_scatter(part, ranges, average=divides_before(part.dtype))

    def _cut(self, flat: Tensor) -> Sequence[Tensor]:
        if self._bucket_bytes is None:
            return [flat]
        parts: tuple[Tensor, ...] = flat.split(max(1, self._bucket_bytes // flat.element_size()))
        return parts


def mean_of_decoded(compression: Compression, payloads: Tensor, out: Tensor) -> None:
    """``out = (((D(p_0) + D(p_1)) + D(p_2)) + ...) / W``, with ``p_r`` the rows of ``payloads``."""
    out.zero_()
    for payload in payloads:
        out += compression.decode(payload, out.numel(), out.dtype)
    out /= len(payloads)


def coalesced(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Copies in one flat buffer for each dtype and device, and views of these as the tensors."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    views = [tensor.detach() for tensor in tensors]  # what has no elements needs no copy
    flats = []
    for (dtype, device), places in kinds.items():
        sizes = [tensors[place].numel() for place in places]
        flats.append(torch.empty(sum(sizes), dtype=dtype, device=device))
        for place, part in zip(places, flats[-1].split(sizes), strict=True):
            views[place] = part.view(tensors[place].shape).copy_(tensors[place])
    return flats, views


def digest_of(tensors: Sequence[Tensor], mark: object = None) -> bytes:
    """Return a digest of all that ranks must have in common to take a mean."""
    kinds = [(tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for tensor in tensors]
    return hashlib.sha256(repr((kinds, mark)).encode()).digest()[:DIGEST_BYTES]


def checksum(tensor: Tensor) -> int:
    """Return the sum of a floating tensor's bits, as whole numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    return int(real.detach().contiguous().view(words).sum(dtype=torch.int64))


def check_agreed(group: dist.ProcessGroup, digest: bytes, device: torch.device) -> None:
    """Check that all ranks of a group have one digest: otherwise they would wait for ever.

    Raises:
        ValueError: names those that have another.
    """
    digests = exchanged(group, device, digest, "compare what is averaged", DIGEST_BYTES)
    others = [GroupRank(rank) for rank, one in enumerate(digests) if one != digest]
    if others:
        raise ValueError(
            f"{named(group, others)} brought other tensors to average than this rank; "
            "all ranks must have the same parameters, of the same shapes and dtypes, the same "
            "tensors of state where that is averaged too, of DTensors the same shards (the process "
            "group is that of the dimension of a mesh over which they are replicated), and under "
            "an outer rule the same anchors (they begin as the parameters, which must be the same "
            "on all ranks)"
        )


def even_ranges(count: int, size: int) -> list[Range]:
    """``count`` elements cut evenly among the ranks of a group."""
    cuts = [count * rank // size for rank in range(size + 1)]
    return list(pairwise(cuts))


def has_mean(tensor: Tensor) -> bool:
    """Return True if a tensor's numbers have a mean: floating and complex ones have."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_has_mean(tensors: Sequence[Tensor]) -> None:
    """Check that each tensor has a mean.

    Raises:
        TypeError: names the first that is not.
    """
    for place, tensor in enumerate(tensors):
        if not has_mean(tensor):
            raise TypeError(f"tensor {place} is of {tensor.dtype}, whose numbers have no mean")


def divides_before(dtype: torch.dtype) -> bool:
    """Return True if terms are divided before they are added, as their sum may overflow."""
    return dtype == torch.float16
