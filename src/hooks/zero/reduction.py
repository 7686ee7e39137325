"""The gradients of a bucket on their way to their owners."""

from collections.abc import Sequence

from torch import Tensor

from hooks.zero.bucket import ZeroBucket
from sharding.transport import Transport, Work
from sharding.zero.coalescing import copy


class Reduction:
    """Reduction of gradients, launched at once.

    Args:
        transport: over the group of the DDP module.
        bucket: whose buffer is reduced in place, each rank its own parts.
    """

    def __init__(self, transport: Transport, bucket: ZeroBucket) -> None:
        self._works: list[Work] = [
            transport.reduce_scatter(one.flat, one.ranges, average=True)
            for one in bucket.messages.direct
        ]
        self._staged: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for one in bucket.messages.coalesced:
            (buffer, parts), own = one.staging(), one.places[transport.rank]
            copy(parts, one.views)
            self._works.append(transport.reduce_scatter(buffer, one.ranges, average=True))
            self._staged.append((one.views[own], parts[own]))

    def wait(self) -> None:
        """Return when this rank's parts are reduced, in the bucket."""
        for work in self._works:
            work.wait()
        for views, parts in self._staged:
            copy(views, parts)
