"""Clipping by the norm of all gradients, each rank measuring what it owns."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from functional_optim.frontends.gradient_norms import addend, addends, both, clip, scale_
from sharding.zero.groups import largest, reduced, vector_of
from sharding.zero.parts import OptimizerParts


def clip_gradients(
    parts: OptimizerParts,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    alone: bool,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns what it was.

    Args:
        parts: of the optimizer.
        max_norm: the largest norm.
        norm_type: the p of the norm; may be infinite.
        error_if_nonfinite: raise where the norm is NaN or infinite.
        alone: measure everything here, and ask no other rank.
    """
    grads = [param.grad for param in parts.params.values() if param.grad is not None]
    total = clip(
        lambda order: _measured(parts, order, alone=alone),
        lambda factor: scale_(grads, factor),
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    wide = any(grad.dtype in {torch.float64, torch.complex128} for grad in grads)
    return torch.tensor(total, dtype=torch.float64 if wide else torch.float32, device=parts.device)


def _measured(parts: OptimizerParts, order: float, *, alone: bool) -> list[float]:
    """Return each parameter's addend to the norm, the same numbers on all ranks."""
    if alone:
        return addends([param.grad for param in parts.params.values()], order).tolist()
    _require_whole_where_sparse(parts)
    vector = vector_of(addends_of(_owned(parts), order), parts.plan)
    if order == math.inf:
        return largest(vector, parts.process_group, parts.device).tolist()
    return reduced(vector, parts.plan, parts.process_group, parts.device).tolist()


def addends_of(gradients: Iterable[tuple[str, Tensor]], order: float) -> dict[str, Tensor]:
    """Return each parameter's addend to a norm, from the gradients of its ranges, by path."""
    found: dict[str, Tensor] = {}
    for path, gradient in gradients:
        added = addend(gradient, order)
        found[path] = both(found[path], added, order) if path in found else added
    return found


def _owned(parts: OptimizerParts) -> Iterator[tuple[str, Tensor]]:
    for one in parts.plan.owned(parts.rank):
        grad = parts.params[one.path].grad
        if grad is not None:
            yield one.path, grad if one.whole else grad.reshape(-1)[one.start : one.stop]


def _require_whole_where_sparse(parts: OptimizerParts) -> None:
    """On all ranks alike, before any of them waits for another.

    Raises:
        RuntimeError: a sparse gradient of a parameter that is cut.
    """
    for path, param in parts.params.items():
        if param.grad is None or param.grad.layout == torch.strided:
            continue
        if any(stop - start < param.numel() for _, start, stop in parts.plan.owners(path)):
            raise RuntimeError(
                f"the gradient of {path!r} is sparse, and the parameter is cut between ranks; "
                "take a policy that leaves parameters whole, or dense gradients"
            )
