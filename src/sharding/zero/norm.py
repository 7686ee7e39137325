"""Clipping by the norm of all gradients. Each rank measures the gradients that it owns."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from functional_optim.engine.gradients import addend, addends, clip, combine_addends, scale_
from sharding.zero.groups import vector_at, vector_of
from sharding.zero.local_shard import slice_gradient
from sharding.zero.range_step_mixin import RangeStepMixin


def clip_gradients(
    zero: RangeStepMixin,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    alone: bool,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; return the old norm.

    Arguments as for :meth:`ZeroRedundancyOptimizer.clip_grad_norm_`. With ``alone``, measure all
    gradients on this rank, without communication.
    """
    grads = [param.grad for param in zero.params.values() if param.grad is not None]
    total = clip(
        lambda order: _reduce_addends(zero, order, alone=alone),
        lambda factor: scale_(grads, factor),
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    wide = any(grad.dtype in {torch.float64, torch.complex128} for grad in grads)
    return torch.tensor(
        total, dtype=torch.float64 if wide else torch.float32, device=zero.join_device
    )


def _reduce_addends(zero: RangeStepMixin, order: float, *, alone: bool) -> list[float]:
    """Return the addends to the norm, equal on all ranks: of parameters, or of their pieces.

    A maximum is taken over pieces. Each piece has one owner, so a sum over ranks is exact, and has
    every NaN, which a maximum over ranks may ignore.
    """
    if alone:
        return addends([param.grad for param in zero.params.values()], order).tolist()
    _check_sparse_gradients(zero)
    if order == math.inf:
        vector = _addends_of_pieces(zero, order)
    else:
        own = ((path, grad) for _, path, grad in _owned(zero))
        vector = vector_of(addends_of(own, order), zero.plan)
    return zero.sum_over_ranks([vector], vector.shape).tolist()


def _addends_of_pieces(zero: RangeStepMixin, order: float) -> Tensor:
    """Return an entry for each piece of the plan; zero for pieces of other ranks."""
    found = {str(position): addend(grad, order) for position, _, grad in _owned(zero)}
    return vector_at(found, {key: int(key) for key in found}, len(zero.plan.pieces))


def addends_of(gradients: Iterable[tuple[str, Tensor]], order: float) -> dict[str, Tensor]:
    """Return each parameter's addend to a norm, by path, from the gradients of its ranges."""
    found: dict[str, Tensor] = {}
    for path, gradient in gradients:
        added = addend(gradient, order)
        found[path] = combine_addends(found[path], added, order) if path in found else added
    return found


def _owned(zero: RangeStepMixin) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the position, the path and the gradient of each piece of this rank."""
    plan = zero.plan
    positions = plan.positions_of_rank(zero.rank)
    for position, one in zip(positions, plan.owned(zero.rank), strict=True):
        grad = zero.params[one.path].grad
        if grad is not None:
            yield position, one.path, slice_gradient(grad, one)


def _check_sparse_gradients(zero: RangeStepMixin) -> None:
    """Raise RuntimeError, on all ranks, for a sparse gradient of a parameter that is cut."""
    for path, param in zero.params.items():
        if param.grad is None or param.grad.layout == torch.strided:
            continue
        if any(stop - start < param.numel() for _, start, stop in zero.plan.owners(path)):
            raise RuntimeError(
                f"the gradient of {path!r} is sparse, and the parameter is cut between ranks; "
                "take a policy that leaves parameters whole, or dense gradients"
            )
