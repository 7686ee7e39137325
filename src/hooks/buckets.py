"""DDP buckets: the position of each in an iteration, and the layout of its gradients."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim._torch.distributed import current_graph_task_id
from functional_optim.engine.tensors import is_dense


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters of the wrapped module whose gradients DDP reduces, by name."""
    return {
        name: param
        for name, param in ddp.module.named_parameters()
        if param.requires_grad and name not in ddp.parameters_to_ignore
    }


class BucketPosition(NamedTuple):
    """Position of a bucket in its iteration."""

    number: int
    last: bool
    backward: int
    """The number of the backward pass that brings the bucket."""


class BucketPositions:
    """Positions of the buckets of an iteration.

    DDP passes the position, except in the first iteration of a static graph. There it reduces all
    buckets at the end of backward, gives each the index 0, and marks none as the last (unless
    there is only one). So if a pass brings a second bucket with index 0, the position follows from
    the parameters that DDP reduces.
    """

    def __init__(self, reduced: Iterable[Tensor]) -> None:
        self._reduced = frozenset(map(id, reduced))
        self._seen: set[int] = set()
        self._before = BucketPosition(-1, last=False, backward=-1)
        self._is_first = True

    def position_of(self, bucket: dist.GradBucket) -> BucketPosition:
        """Return the position of a bucket. Call it once per bucket, in order of arrival."""
        backward = current_graph_task_id()
        position = BucketPosition(bucket.index(), bucket.is_last(), backward)
        if self._is_first:
            params = set(map(id, bucket.parameters()))
            position = self._before = self._by_parameters(position, params)
            self._is_first = not position.last
        return position

    def _by_parameters(self, position: BucketPosition, params: set[int]) -> BucketPosition:
        """Return a bucket's position in the first iteration; ``position`` is that of DDP."""
        same_pass = position.backward == self._before.backward >= 0
        # Parameters seen before belong to an iteration that failed, or to another module.
        continues = position.number == 0 and same_pass and not params & self._seen
        if position.number == 0 and not continues:
            self._seen = set()
        self._seen |= params
        if not continues:
            return position
        return position._replace(number=self._before.number + 1, last=self._seen >= self._reduced)


def gradient_views(buffer: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return a view of a bucket's buffer per parameter, in the parameter's shape and dtype.

    DDP stores a gradient with the strides of its parameter if that is dense (channels_last, a
    transpose), and a complex gradient as its real view. ``GradBucket.gradients()`` ignores this:
    its views are all contiguous, and so have the elements of other layouts in the wrong places.
    """
    views: list[Tensor] = []
    offset = buffer.storage_offset()
    for param in params:
        real = torch.view_as_real(param.detach()) if _as_real(buffer, param) else param.detach()
        if is_dense(real):
            strides = real.stride()
        else:
            strides = torch.empty(real.shape, device="meta").stride()
        view = buffer.as_strided(real.shape, strides, offset)
        views.append(torch.view_as_complex(view) if _as_real(buffer, param) else view)
        offset += real.numel()
    return views


def bucket_gradients(buffer: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of each parameter; a sparse gradient has a bucket to itself."""
    return [buffer] if buffer.is_sparse else gradient_views(buffer, params)


def _as_real(buffer: Tensor, param: Tensor) -> bool:
    return param.is_complex() and not buffer.is_complex()
