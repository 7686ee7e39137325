"""Position of each bucket that DDP hands to a hook in its iteration.

DDP says so itself, but in the first iteration of a static graph. There it reduces all buckets when
backward is over, calls each of them number 0, and none the last one unless it is the only one. So
where another bucket with that number comes in one backward pass, its parameters tell.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim._torch import current_graph_task_id


def reduced_by(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters of the wrapped module whose gradients DDP reduces, by name."""
    return {
        name: param
        for name, param in ddp.module.named_parameters()
        if param.requires_grad and name not in ddp.parameters_to_ignore
    }


class BucketPlace(NamedTuple):
    """Position of a bucket in its iteration."""

    number: int
    last: bool
    backward: int
    """A number of the backward pass that it came in."""


class Arrivals:
    """The buckets of the running iteration.

    Args:
        reduced: all parameters whose gradients DDP reduces.
    """

    def __init__(self, reduced: Iterable[Tensor]) -> None:
        self._reduced = frozenset(map(id, reduced))
        self._seen: set[int] = set()
        self._before = BucketPlace(-1, last=False, backward=-1)
        self._first = True

    def place_of(self, bucket: dist.GradBucket) -> BucketPlace:
        """The place of a bucket; to be asked once for each, as they come."""
        backward = current_graph_task_id()
        place = BucketPlace(bucket.index(), bucket.is_last(), backward)
        if self._first:
            place = self._before = self._by_parameters(place, set(map(id, bucket.parameters())))
            self._first = not place.last
        return place

    def _by_parameters(self, told: BucketPlace, params: set[int]) -> BucketPlace:
        """Return a bucket's position in the first iteration; ``told`` is DDP's index."""
        same_pass = told.backward == self._before.backward >= 0
        # Those that have come already are of an iteration that failed, or of another module.
        goes_on = told.number == 0 and same_pass and not params & self._seen
        if told.number == 0 and not goes_on:
            self._seen = set()
        self._seen |= params
        if not goes_on:
            return told
        return told._replace(number=self._before.number + 1, last=self._seen >= self._reduced)
