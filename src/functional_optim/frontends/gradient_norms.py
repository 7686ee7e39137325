"""Clipping of gradients, wherever they are: ``torch.nn.utils.clip_grad_norm_`` of every front-end.

    n = (sum over all elements of all gradients of |g|^p)^(1/p)
    g = g * min(1, c / (n + 1e-6))

A rank, a worker or a leaf adds one number for each parameter; what adds these up over all of them
is given to :func:`clip`. Whoever calls it has what torch has:

========================  ===========================================================
a gradient with NaN       the norm is NaN, and then so are all gradients
one with an infinity      the norm is infinite: finite elements become 0, infinite NaN
either, and               an error, before anything is scaled
``error_if_nonfinite``
None; an empty gradient   adds 0
16 bits                   measured in float64, scaled by a number that is not rounded
                          (a chain rounds it to 16 bits: its stages know one dtype)
sparse                    its elements, equal rows summed
no gradient required      counts all the same where there is a gradient
several devices           measured where each gradient is, scaled there
========================  ===========================================================
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from functional_optim._torch import foreach_mul_, foreach_scale_, values_of
from functional_optim.transforms.clip_by_global_norm import clip_factor, sum_of_squares


def clip(
    measure: Callable[[float], Iterable[float]],
    scale: Callable[[float], object],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale gradients so that their joint norm is at most ``max_norm``.

    Args:
        measure: what each parameter adds to the norm of an order, summed over ranks and workers,
            in the order of parameters: the same numbers for all of them.
        scale: multiplies all gradients by a number.
        max_norm: the largest norm, c.
        norm_type: p, above 0; may be infinite.
        error_if_nonfinite: raise where the norm is NaN or infinite.

    Returns:
        The norm before.

    Raises:
        ValueError: ``max_norm`` is below 0 or NaN, or ``norm_type`` not above 0.
        RuntimeError: the norm is not finite, where that is to be an error.
    """
    limit, order = checked_norm(max_norm), float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be a number above 0, got {norm_type!r}")
    total = norm_of(measure(order), order)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {order} of all gradients is {total}, so they cannot be clipped; "
            "give error_if_nonfinite=False to scale them by it nevertheless"
        )
    factor: float = clip_factor(limit, total)  # type: ignore[arg-type, assignment]  # a number gives a number
    if factor != 1.0:  # by NaN too
        scale(factor)
    return total


def checked_norm(max_norm: float) -> float:
    """A bound for a norm.

    Raises:
        ValueError: a negative one, or NaN.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    return float(max_norm)


def addend(values: Tensor, order: float) -> Tensor:
    """Return the addend of elements to a norm: ``sum |g|^order`` or ``max |g|``, in float64.

    Args:
        values: of one gradient, or a part of it.
        order: of the norm, above 0.
    """
    own = _dense(values.detach())
    if own.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=own.device)
    if order == 2.0:
        return sum_of_squares(torch.view_as_real(own) if own.is_complex() else own)
    real = own.abs() if own.is_complex() else own
    norm: Tensor = torch.linalg.vector_norm(real, order, dtype=torch.float64)
    return norm if order == math.inf else norm.pow(order)


def both(one: Tensor, other: Tensor, order: float) -> Tensor:
    """Return the addend of two parts of one gradient."""
    return torch.maximum(one, other) if order == math.inf else one + other


def addends(gradients: Sequence[Tensor | None], order: float) -> Tensor:
    """Return the addend of several gradients; None adds 0.

    Returns:
        One number for each, on the CPU.
    """
    device = next((grad.device for grad in gradients if grad is not None), torch.device("cpu"))
    none = torch.zeros((), dtype=torch.float64, device=device)
    found = [none if grad is None else addend(grad, order) for grad in gradients]
    if not found:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    return torch.stack([one.to(device) for one in found]).cpu()  # one journey for all


def norm_of(added: Iterable[float], order: float) -> float:
    """The norm of all gradients from what each adds, in the order given."""
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
        for grads in alike(gradients):
            # With 16-bit gradients, torch rounds a number to 16 bits on the CPU, and a tensor on
            # other devices.
            if grads[0].is_cpu:
                foreach_mul_(grads, torch.full((), factor, dtype=torch.float64, device="cpu"))
            else:
                foreach_scale_(grads, [factor] * len(grads))


def alike(gradients: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """The values of gradients, those of one device and dtype together, without autograd."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in gradients:
        if grad is not None:
            # Values that are not coalesced yet are scaled as well as their sum.
            own = (values_of(grad) if grad.is_sparse else grad).detach()
            if own.is_complex() and not own.is_conj():
                own = torch.view_as_real(own)
            found.setdefault((own.device, own.dtype), []).append(own)
    return list(found.values())


def _dense(grad: Tensor) -> Tensor:
    """The elements that a gradient holds, equal rows summed."""
    return grad if grad.layout == torch.strided else grad.coalesce().values()
