"""Bucket of a ZeRO hook: its sharded parameters, their owners, and the reduction to the owners."""

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from hooks.buckets import BucketPosition, gradient_views
from sharding import Owner, ShardPlan
from sharding.transport import Transport
from sharding.zero.coalescing import ElementMessage, plan_messages
from sharding.zero.local_shards import Gradients


class Member(NamedTuple):
    """Sharded parameter of a bucket."""

    path: str
    param: Tensor
    gradient: Tensor
    """A view of the buffer, in the shape of the parameter."""
    offset: int
    """The first element in the buffer."""
    factor: int
    """Elements of the buffer per element of the parameter: 2 for complex stored as real, else 1."""


class ZeroBucket:
    """Bucket that DDP passes to the hook in every iteration.

    Args:
        bucket: as DDP passes it.
        position: in the iteration.
        members: its sharded parameters. The hook does not step other parameters in it.
        plan: the owner of each element.
        size: of the group.
    """

    def __init__(
        self,
        bucket: dist.GradBucket,
        position: BucketPosition,
        members: Iterable[Member],
        plan: ShardPlan,
        size: int,
    ) -> None:
        self.number = position.number
        self.last = position.last
        self.buffer: Tensor = bucket.buffer()
        self.members = tuple(members)
        self.paths = tuple(one.path for one in self.members)
        self.params = tuple(one.param for one in self.members)
        self.gradients = tuple(one.gradient for one in self.members)
        self._all_params: list[Tensor] = bucket.parameters()
        self._seen = [param.detach() for param in self._all_params]
        self._plan = plan
        self._size = size
        self._owned: dict[int, Gradients] = {}

    def is_same(self, bucket: dist.GradBucket, position: BucketPosition) -> bool:
        """Return True if DDP passes the same memory as last time, and no parameter has moved."""
        buffer, params = bucket.buffer(), bucket.parameters()
        return (
            self.buffer.is_set_to(buffer)
            and self.last == position.last
            and len(params) == len(self._all_params)
            and all(map(operator.is_, params, self._all_params))
            and all(map(Tensor.is_set_to, params, self._seen))
        )

    @cached_property
    def messages(self) -> tuple[ElementMessage, ...]:
        """Return the messages that send gradients to their owners, in the first replica."""
        owners = [
            Owner(ranks, one.offset + one.factor * a, one.offset + one.factor * b)
            for one in self.members
            for ranks, a, b in self._plan.owners(one.path)
        ]
        return plan_messages([(self.buffer, owners)], [], self._size)

    def owned_gradients(self, rank: int, without: Iterable[str] = ()) -> Gradients:
        """Return the current gradients of a rank's elements, except of paths in ``without``."""
        if rank not in self._owned:
            self._owned[rank] = self._find_owned(rank)
        found, left_out = self._owned[rank], set(without)
        if not left_out:
            return found
        return {path: ranges for path, ranges in found.items() if path not in left_out}

    def _find_owned(self, rank: int) -> Gradients:
        found: dict[str, list[tuple[int, int, Tensor]]] = {}
        for one in self.members:
            for ranks, start, stop in self._plan.owners(one.path):
                if ranks[0] == rank:
                    whole = stop - start == one.gradient.numel()
                    own = one.gradient if whole else one.gradient.view(-1)[start:stop]
                    found.setdefault(one.path, []).append((start, stop, own))
        return found


class BucketCache:
    """Buckets of a module, cached while DDP passes the same memory.

    Args:
        plan: the owner of each element.
        paths: of the sharded parameters, by their ``id``.
        size: of the group.
    """

    def __init__(self, plan: ShardPlan, paths: Mapping[int, str], size: int) -> None:
        self.plan = plan
        self._paths = paths
        self._size = size
        self._known: dict[int, ZeroBucket] = {}
        self._addresses: dict[int, int] = {}

    def get(self, bucket: dist.GradBucket, position: BucketPosition) -> ZeroBucket:
        """Return the bucket, from the cache if possible.

        Raises:
            ValueError: a sparse gradient, or a gradient of another dtype than its parameter.
        """
        number = position.number
        known = self._known.get(number)
        if known is not None and known.is_same(bucket, position):
            return known
        if position.last:
            self._known = {one: kept for one, kept in self._known.items() if one < number}
        self._known.pop(number, None)
        members = self._members(bucket)
        found = ZeroBucket(bucket, position, members, self.plan, self._size)
        # Cached from the second time on: DDP replaces its first buckets, and they must be freed.
        address = found.buffer.data_ptr()
        if self._addresses.get(number) == address:
            self._known[number] = found
        self._addresses[number] = address
        return found

    def _members(self, bucket: dist.GradBucket) -> list[Member]:
        buffer, params = bucket.buffer(), bucket.parameters()
        first = next((param for param in params if id(param) in self._paths), None)
        if first is None:
            return []
        self._check(buffer, first)
        members, offset = [], 0
        for param, gradient in zip(params, gradient_views(buffer, params), strict=True):
            factor = 2 if param.is_complex() and not buffer.is_complex() else 1
            if id(param) in self._paths:
                members.append(Member(self._paths[id(param)], param, gradient, offset, factor))
            offset += factor * param.numel()
        return members

    def _check(self, buffer: Tensor, param: Tensor) -> None:
        path = self._paths[id(param)]
        if buffer.is_sparse:
            raise ValueError(
                f"the gradient of {path!r} is sparse, and its elements cannot be shared out among "
                "ranks; use sparse=False"
            )
        if buffer.dtype not in {param.dtype, param.dtype.to_real()}:
            raise ValueError(
                f"DDP reduces the gradient of {path!r}, of {param.dtype}, in {buffer.dtype}; "
                "sharded steps do not work with DDP's mixed_precision: use torch.autocast"
            )


def start_reduction(transport: Transport, bucket: ZeroBucket) -> Callable[[], None]:
    """Start to reduce a bucket's gradients to their owners, in place; return a function that waits.

    Each rank gets the parts that it owns. The transport is over the group of the DDP module.
    """
    waits = [one.reduce(transport) for one in bucket.messages]

    def wait() -> None:
        for one in waits:
            one()

    return wait
