"""What is kept of a GradBucket: its parameters that are sharded, and who owns what of them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from hooks.bucket_layout import gradient_views, is_dense
from hooks.zero.layout import Layout, Layouts, Member

Gradients = dict[str, list[tuple[int, int, Tensor]]]
"""By path, ranges of the parameter laid flat, each with its gradient."""


class ZeroBucket(NamedTuple):
    """A bucket, until it is stepped; columns run parallel to ``members``."""

    number: int
    last: bool
    buffer: Tensor
    members: tuple[Member, ...]
    """The parameters of it that are sharded. Others in it are left to somebody else."""
    params: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    """Views of the buffer, in the shape of the parameters."""
    layout: Layout

    @property
    def paths(self) -> list[str]:
        """The paths of the parameters."""
        return [member.path for member in self.members]

    def owned(self, rank: int, without: Iterable[str] = ()) -> Gradients:
        """The gradients of what a rank owns, as they are now.

        Args:
            rank: in the replica.
            without: paths of parameters to leave out.
        """
        left_out = set(without)
        found: Gradients = {}
        for part in self.layout.parts:
            path = self.members[part.member].path
            if part.rank == rank and path not in left_out:
                gradient = self.gradients[part.member]
                if not self.members[part.member].flat and part.numel == gradient.numel():
                    piece = gradient  # in its shape, so that it is clear which element is which
                else:
                    piece = gradient.reshape(-1)[part.start : part.stop]
                found.setdefault(path, []).append((part.start, part.stop, piece))
        return found


def kept(bucket: dist.GradBucket, paths: Mapping[int, str], layouts: Layouts) -> ZeroBucket:
    """What is needed of a bucket.

    Args:
        bucket: as DDP hands it to its hook.
        paths: of the parameters that are sharded, by their identity.
        layouts: those known already.

    Raises:
        ValueError: a sparse gradient, or one of another dtype than its parameter.
    """
    buffer, params = bucket.buffer(), bucket.parameters()
    sharded = [place for place, param in enumerate(params) if id(param) in paths]
    if not sharded:
        nothing = layouts.of(())
        return ZeroBucket(bucket.index(), bucket.is_last(), buffer, (), (), (), nothing)
    first = params[sharded[0]]
    if buffer.is_sparse:
        raise ValueError(
            f"the gradient of {paths[id(first)]!r} is sparse, and its elements cannot be shared "
            "out among ranks; use sparse=False"
        )
    if buffer.dtype not in {first.dtype, first.dtype.to_real()}:
        raise ValueError(
            f"DDP reduces the gradient of {paths[id(first)]!r}, of {first.dtype}, in "
            f"{buffer.dtype}; sharded steps do not work with DDP's mixed_precision: use "
            "torch.autocast"
        )
    views = gradient_views(buffer, params)
    members, offset = [], 0
    for place, param in enumerate(params):
        factor = 2 if param.is_complex() and not buffer.is_complex() else 1
        if id(param) in paths:
            flat = param.is_contiguous() and views[place].is_contiguous()
            path = paths[id(param)]
            members.append(
                Member(path, param.numel(), offset, factor, flat, is_dense(param.detach()))
            )
        offset += factor * param.numel()
    return ZeroBucket(
        bucket.index(),
        bucket.is_last(),
        buffer,
        tuple(members),
        tuple(params[place] for place in sharded),
        tuple(views[place] for place in sharded),
        layouts.of(tuple(members)),
    )
