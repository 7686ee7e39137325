"""What is done with gradients before a step: measured, scaled, checked for infinities."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from functional_optim._torch import (
    amp_foreach_non_finite_check_and_unscale_,
    foreach_mul_,
    values_of,
)
from functional_optim.transforms.clip_by_global_norm import clip_factor


def addend(values: Tensor, order: float) -> Tensor:
    """What elements add to a norm, ``sum |g|^order``, or ``max |g|`` for infinity, in float64.

    Args:
        values: dense, of one gradient or a part of it.
        order: of the norm, above 0.
    """
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    real = values.abs() if values.is_complex() else values
    norm: Tensor = torch.linalg.vector_norm(real, order, dtype=torch.float64)
    return norm if order == math.inf else norm.pow(order)


def addends(gradients: Sequence[Tensor | None], order: float) -> Tensor:
    """The same for several gradients; None adds 0.

    Returns:
        One number for each, on the CPU.
    """
    device = next((grad.device for grad in gradients if grad is not None), torch.device("cpu"))
    none = torch.zeros((), dtype=torch.float64, device=device)
    found = [none if grad is None else addend(_dense(grad.detach()), order) for grad in gradients]
    return torch.stack([one.to(device) for one in found]).cpu()  # one journey for all


def _dense(grad: Tensor) -> Tensor:
    """The elements that a gradient holds, equal rows summed."""
    return grad if grad.layout == torch.strided else grad.coalesce().values()


def norm_of(added: Iterable[float], order: float) -> float:
    """The norm of all gradients, whatever workers they are on: summed in the order given."""
    values = list(added)
    if order == math.inf:
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
    total = 0.0
    for value in values:
        total += value
    return math.pow(total, 1.0 / order)


def factor_of(total: float, max_norm: float, order: float, *, error_if_nonfinite: bool) -> float:
    """What gradients are scaled by, as in ``torch.nn.utils.clip_grad_norm_``.

    Raises:
        RuntimeError: the norm is NaN or infinite, where that is to be an error.
    """
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {order} of all gradients is {total}, so they cannot be clipped; "
            "give error_if_nonfinite=False to scale them by it nevertheless"
        )
    number: float = clip_factor(max_norm, total)  # type: ignore[arg-type, assignment]  # a number gives a number
    return number


def scale_(gradients: Iterable[Tensor | None], factor: float) -> None:
    """Multiply gradients in place."""
    with torch.no_grad():
        for grads in _alike(gradients):
            # A tensor: torch would round a number to the 16 bits of such gradients first.
            foreach_mul_(grads, torch.tensor(factor, dtype=torch.float64, device=grads[0].device))


def unscale_(gradients: Iterable[Tensor | None], scale: Tensor) -> list[Tensor]:
    """Divide gradients by GradScaler's scale, in place, as it does: by the inverse.

    Returns:
        Numbers, one of which is not 0 where some element is not finite.
    """
    inverse = scale.double().reciprocal().float()
    found = []
    for grads in _alike(gradients):
        device = grads[0].device
        is_infinite = torch.zeros((), dtype=torch.float32, device=device)
        amp_foreach_non_finite_check_and_unscale_(grads, is_infinite, inverse.to(device))
        found.append(is_infinite)
    return found


def _alike(gradients: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """The values of gradients, those of one device and dtype together, without autograd."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in gradients:
        if grad is not None:
            # Values that are not coalesced yet are scaled as well as their sum.
            own = values_of(grad) if grad.is_sparse else grad
            found.setdefault((own.device, own.dtype), []).append(own.detach())
    return list(found.values())
