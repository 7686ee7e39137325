"""Record of a GradBucket: its sharded parameters, and their owners."""

import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from hooks.arrivals import BucketPlace
from hooks.bucket_layout import gradient_views
from sharding import ShardPlan
from sharding.zero.coalescing import Coalescing, OwnedSpan, planned

Gradients = dict[str, list[tuple[int, int, Tensor]]]
"""By path, ranges of the parameter laid flat, each with its gradient."""


class Member(NamedTuple):
    """A parameter of a bucket that is sharded."""

    path: str
    param: Tensor
    gradient: Tensor
    """A view of the buffer, in the shape of the parameter."""
    offset: int
    """Where it begins, in elements of the buffer."""
    factor: int
    """Elements of the buffer for each of its own: 2 for a complex one that is kept as real."""


class ZeroBucket:
    """A bucket, as DDP hands it over in every iteration.

    Args:
        bucket: as DDP hands it to its hook.
        place: where it stands in its iteration.
        members: its parameters that are sharded. Others in it are left to somebody else.
        plan: who owns what.
        size: of the group.
    """

    def __init__(
        self,
        bucket: dist.GradBucket,
        place: BucketPlace,
        members: Iterable[Member],
        plan: ShardPlan,
        size: int,
    ) -> None:
        self.number = place.number
        self.last = place.last
        self.buffer: Tensor = bucket.buffer()
        self.members = tuple(members)
        self.paths = tuple(one.path for one in self.members)
        self.params = tuple(one.param for one in self.members)
        self.gradients = tuple(one.gradient for one in self.members)
        self._of_all: list[Tensor] = bucket.parameters()
        self._seen = [param.detach() for param in self._of_all]
        self._plan = plan
        self._size = size
        self._owned: dict[int, Gradients] = {}

    def is_same(self, bucket: dist.GradBucket, place: BucketPlace) -> bool:
        """Return True if DDP hands over the memory of last time, and parameters have not moved."""
        buffer, params = bucket.buffer(), bucket.parameters()
        return (
            self.buffer.is_set_to(buffer)
            and self.last == place.last
            and len(params) == len(self._of_all)
            and all(map(operator.is_, params, self._of_all))
            and all(map(Tensor.is_set_to, params, self._seen))
        )

    @cached_property
    def messages(self) -> Coalescing:
        """Return the messages that send the gradients to their owners, in the first replica."""
        spans = [
            OwnedSpan(one.offset + one.factor * a, one.offset + one.factor * b, ranks[0])
            for one in self.members
            for ranks, a, b in self._plan.owners(one.path)
        ]
        return planned([(self.buffer, spans)], [], self._size)

    def owned(self, rank: int, without: Iterable[str] = ()) -> Gradients:
        """The gradients of what a rank owns, as they are now.

        Args:
            rank: in the replica.
            without: paths of parameters to leave out.
        """
        if rank not in self._owned:
            self._owned[rank] = self._found_owned(rank)
        found, left_out = self._owned[rank], set(without)
        if not left_out:
            return found
        return {path: ranges for path, ranges in found.items() if path not in left_out}

    def _found_owned(self, rank: int) -> Gradients:
        found: Gradients = {}
        for one in self.members:
            for ranks, start, stop in self._plan.owners(one.path):
                if ranks[0] == rank:
                    whole = stop - start == one.gradient.numel()
                    own = one.gradient if whole else one.gradient.view(-1)[start:stop]
                    found.setdefault(one.path, []).append((start, stop, own))
        return found


class KnownBuckets:
    """The buckets of a module, each found out about once, as long as it comes again.

    Args:
        plan: who owns what.
        paths: of the parameters that are sharded, by their identity.
        size: of the group.
    """

    def __init__(self, plan: ShardPlan, paths: Mapping[int, str], size: int) -> None:
        self.plan = plan
        self._paths = paths
        self._size = size
        self._known: dict[int, ZeroBucket] = {}
        self._came: dict[int, int] = {}

    def of(self, bucket: dist.GradBucket, place: BucketPlace) -> ZeroBucket:
        """Make the record of a bucket.

        Args:
            bucket: as DDP hands it to its hook.
            place: where it stands in its iteration.

        Raises:
            ValueError: a sparse gradient, or one of another dtype than its parameter.
        """
        number = place.number
        known = self._known.get(number)
        if known is not None and known.is_same(bucket, place):
            return known
        if place.last:
            self._known = {one: kept for one, kept in self._known.items() if one < number}
        self._known.pop(number, None)
        members = self._members(bucket)
        found = ZeroBucket(bucket, place, members, self.plan, self._size)
        # DDP's first buckets come once: kept here, they would stay beside those that come later.
        address = found.buffer.data_ptr()
        if self._came.get(number) == address:
            self._known[number] = found
        self._came[number] = address
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
