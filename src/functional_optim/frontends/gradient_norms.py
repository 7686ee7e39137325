"""Clipping of gradients by their norm, as ``torch.nn.utils.clip_grad_norm_``, for all front-ends.

    n = (sum over all elements of all gradients of |g|^p)^(1/p)
    g = g * min(1, c / (n + 1e-6))

Each parameter has one addend. A front-end passes :func:`clip` a function that sums the addends over
ranks and workers. The results are those of torch:

============================  ===============================================================
NaN in a gradient             the norm is NaN, and all gradients become NaN
infinity in a gradient        the norm is infinite: finite elements become 0, infinite ones NaN
both, ``error_if_nonfinite``  an error, before any gradient is scaled
None; an empty gradient       adds 0
16-bit gradient               reduced in float64, scaled by a factor that is not rounded
                              (a chain rounds the factor to 16 bits: its stages have one dtype)
sparse gradient               its elements, equal rows summed
parameter is not trained      counts if it has a gradient
several devices               each gradient is reduced and scaled on its device
============================  ===============================================================
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_mul_
from functional_optim._torch.tensors import values_of
from functional_optim.transforms.clip_by_global_norm import clip_factor, sum_of_squares


def clip(
    measure: Callable[[float], Iterable[float]],
    scale: Callable[[float], object],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale gradients to a joint norm of at most ``max_norm``; return the norm before that.

    ``measure`` returns each parameter's addend to a norm, summed over ranks and workers: all ranks
    get the same numbers in the same order. ``scale`` multiplies all gradients by a factor.
    """
    limit, order = check_max_norm(max_norm), float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be a number above 0, got {norm_type!r}")
    total = norm_of(measure(order), order)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {order} of all gradients is {total}, so they cannot be clipped; "
            "give error_if_nonfinite=False to scale them by it nevertheless"
        )
    factor: float = clip_factor(limit, total)  # type: ignore[arg-type, assignment]  # float in, float out
    if factor != 1.0:  # also if it is NaN
        scale(factor)
    return total


def check_max_norm(max_norm: float) -> float:
    """Return ``max_norm`` as a float; raise ValueError if it is negative or NaN."""
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    return float(max_norm)


def addend(values: Tensor, order: float) -> Tensor:
    """Return the addend of a gradient, or a part of one: ``sum |g|^order`` or ``max |g|``.

    The result is float64. ``order`` is above 0.
    """
    own = values.detach()
    if own.layout != torch.strided:
        own = own.coalesce().values()
    if own.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=own.device)
    if order == 2.0:
        return sum_of_squares(torch.view_as_real(own) if own.is_complex() else own)
    real = own.abs() if own.is_complex() else own
    norm: Tensor = torch.linalg.vector_norm(real, order, dtype=torch.float64)
    return norm if order == math.inf else norm.pow(order)


def combine_addends(one: Tensor, other: Tensor, order: float) -> Tensor:
    """Return the addend of a gradient from the addends of two parts of it."""
    return torch.maximum(one, other) if order == math.inf else one + other


def addends(gradients: Sequence[Tensor | None], order: float) -> Tensor:
    """Return the addends of gradients in one tensor on the CPU; None has the addend 0."""
    device = next((grad.device for grad in gradients if grad is not None), torch.device("cpu"))
    none = torch.zeros((), dtype=torch.float64, device=device)
    found = [none if grad is None else addend(grad, order) for grad in gradients]
    if not found:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    return torch.stack([one.to(device) for one in found]).cpu()  # one transfer to the host


def norm_of(added: Iterable[float], order: float) -> float:
    """Return the norm of all gradients, from their addends. The order of the sum is fixed."""
    values = list(added)
    if order == math.inf:
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
    total = 0.0
    for value in values:
        total += value
    return math.sqrt(total) if order == 2.0 else math.pow(total, 1.0 / order)


def scale_(gradients: Iterable[Tensor | None], factor: float) -> None:
    """Multiply gradients in place."""
    with torch.no_grad():
        for grads in group_by_dtype(gradients):
            # torch rounds the factor of 16-bit gradients to 16 bits: on the CPU if it is a number,
            # on other devices if it is a tensor.
            if grads[0].is_cpu:
                foreach_mul_(grads, torch.full((), factor, dtype=torch.float64, device="cpu"))
            else:
                foreach_mul_(grads, [factor] * len(grads))


def group_by_dtype(gradients: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Return the detached values of gradients, in one list for each device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in gradients:
        if grad is not None:
            # Scaling is linear, so sparse values need not be coalesced.
            own = (values_of(grad) if grad.is_sparse else grad).detach()
            if own.is_complex() and not own.is_conj():
                own = torch.view_as_real(own)
            found.setdefault((own.device, own.dtype), []).append(own)
    return list(found.values())
