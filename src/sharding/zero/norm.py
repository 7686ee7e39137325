"""Clipping by the norm of all gradients, each rank measuring what it owns."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.frontends.gradient_norms import addend, factor_of, scale_
from sharding.shard_plan import OwnedRange
from sharding.zero.groups import in_order, reduced, vector_of
from sharding.zero.parts import Parts


def clip_gradients(
    parts: Parts, max_norm: float, norm_type: float, *, error_if_nonfinite: bool, alone: bool
) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns what it was.

    Args:
        parts: of the optimizer.
        max_norm: the largest norm.
        norm_type: the p of the norm; may be infinite.
        error_if_nonfinite: raise where the norm is NaN or infinite.
        alone: measure everything here, and ask no other rank.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a number above 0, got {norm_type!r}")
    every = [
        OwnedRange(place, path, 0, param.numel(), whole=True)
        for place, (path, param) in enumerate(parts.params.items())
    ]
    owned = every if alone else parts.plan.owned(parts.rank)
    total = _norm(parts, owned, float(norm_type), alone=alone)
    factor = factor_of(total, float(max_norm), norm_type, error_if_nonfinite=error_if_nonfinite)
    grads = [param.grad for param in parts.params.values() if param.grad is not None]
    if factor != 1.0:  # by NaN too, as in torch
        scale_(grads, factor)
    wide = any(grad.dtype in {torch.float64, torch.complex128} for grad in grads)
    return torch.tensor(total, dtype=torch.float64 if wide else torch.float32, device=parts.device)


def _norm(parts: Parts, owned: Sequence[OwnedRange], order: float, *, alone: bool) -> float:
    addends: dict[str, Tensor] = {}
    for one in owned:
        grad = parts.params[one.path].grad
        if grad is not None:
            added = addend(_range_of(grad.detach(), one), order)
            before = addends.get(one.path)
            addends[one.path] = added if before is None else _added(before, added, order)
    vector = vector_of(addends, parts.plan)
    if order == math.inf:
        # A maximum over ranks may lose a NaN, so that travels beside it.
        largest = vector.nan_to_num(0.0, math.inf).max()
        largest = torch.stack([largest, vector.isnan().any().double()])
        largest = largest.to(parts.device)
        if not alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=parts.process_group)
        norm, is_nan = largest.tolist()
        return math.nan if is_nan else float(norm)
    if not alone:
        vector = reduced(vector, parts.plan, parts.process_group, parts.device)
    return math.pow(float(in_order(vector)), 1.0 / order)


def _range_of(grad: Tensor, one: OwnedRange) -> Tensor:
    if grad.layout != torch.strided:
        if not one.whole:
            raise RuntimeError(
                f"the gradient of {one.path!r} is sparse, and the parameter is cut between ranks; "
                "take a policy that leaves parameters whole, or dense gradients"
            )
        grad = grad.coalesce().values()
    elif not one.whole:
        grad = grad.reshape(-1)[one.start : one.stop]
    return grad


def _added(one: Tensor, other: Tensor, order: float) -> Tensor:
    return torch.maximum(one, other) if order == math.inf else one + other
