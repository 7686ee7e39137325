"""Gradients to their owners and parameters from them, bucket by bucket, over a transport."""

from collections.abc import Sequence

from torch import Tensor

from hooks.zero.bucket import ZeroBucket
from sharding.transport import Transport, Work
from sharding.zero.route import copy


class Reduction:
    """The gradients of a bucket on their way to their owners, launched at once.

    Args:
        transport: over the group of the DDP module.
        bucket: whose buffer is reduced in place, each rank its own parts.
    """

    def __init__(self, transport: Transport, bucket: ZeroBucket) -> None:
        self._works: list[Work] = [
            transport.reduce_scatter(one.flat, one.ranges, average=True)
            for one in bucket.route.direct
        ]
        self._packed: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for pack in bucket.route.packs:
            held, own = pack.held(), pack.places[transport.rank]
            copy(held.pieces, pack.views)
            self._works.append(transport.reduce_scatter(held.buffer, pack.ranges, average=True))
            self._packed.append((pack.views[own], held.pieces[own]))

    def wait(self) -> None:
        """Return when this rank's parts are reduced, in the bucket."""
        for work in self._works:
            work.wait()
        for views, pieces in self._packed:
            copy(views, pieces)
