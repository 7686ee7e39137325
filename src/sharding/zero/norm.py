"""Clipping by the norm of all gradients. Each rank measures the gradients that it owns."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from functional_optim.frontends.gradient_norms import addend, addends, clip, combine_addends, scale_
from sharding.zero.groups import all_reduce_max, all_reduce_vector, vector_of
from sharding.zero.optimizer_parts import OptimizerParts


def clip_gradients(
    parts: OptimizerParts,
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
    grads = [param.grad for param in parts.params.values() if param.grad is not None]
    total = clip(
        lambda order: _reduce_addends(parts, order, alone=alone),
        lambda factor: scale_(grads, factor),
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    wide = any(grad.dtype in {torch.float64, torch.complex128} for grad in grads)
    return torch.tensor(total, dtype=torch.float64 if wide else torch.float32, device=parts.device)


def _reduce_addends(parts: OptimizerParts, order: float, *, alone: bool) -> list[float]:
    """Return each parameter's addend to the norm, equal on all ranks."""
    if alone:
        return addends([param.grad for param in parts.params.values()], order).tolist()
    _check_sparse_gradients(parts)
    vector = vector_of(addends_of(_owned(parts), order), parts.plan)
    if order == math.inf:
        return all_reduce_max(vector, parts.process_group, parts.device).tolist()
    return all_reduce_vector(vector, parts.plan, parts.process_group, parts.device).tolist()


def addends_of(gradients: Iterable[tuple[str, Tensor]], order: float) -> dict[str, Tensor]:
    """Return each parameter's addend to a norm, by path, from the gradients of its ranges."""
    found: dict[str, Tensor] = {}
    for path, gradient in gradients:
        added = addend(gradient, order)
        found[path] = combine_addends(found[path], added, order) if path in found else added
    return found


def _owned(parts: OptimizerParts) -> Iterator[tuple[str, Tensor]]:
    for one in parts.plan.owned(parts.rank):
        grad = parts.params[one.path].grad
        if grad is not None:
            yield one.path, grad if one.whole else grad.reshape(-1)[one.start : one.stop]


def _check_sparse_gradients(parts: OptimizerParts) -> None:
    """Raise RuntimeError, on all ranks, for a sparse gradient of a parameter that is cut."""
    for path, param in parts.params.items():
        if param.grad is None or param.grad.layout == torch.strided:
            continue
        if any(stop - start < param.numel() for _, start, stop in parts.plan.owners(path)):
            raise RuntimeError(
                f"the gradient of {path!r} is sparse, and the parameter is cut between ranks; "
                "take a policy that leaves parameters whole, or dense gradients"
            )
