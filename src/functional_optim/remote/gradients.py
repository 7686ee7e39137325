"""What is done with gradients before a step: measured, scaled, checked for infinities."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from functional_optim.transforms.clip_by_global_norm import clip_factor


def addends(gradients: Sequence[Tensor | None], order: float) -> Tensor:
    """What each gradient adds to a norm: ``sum |g|^order``, or ``max |g|`` for infinity.

    Args:
        gradients: or None, which adds 0.
        order: of the norm, above 0.

    Returns:
        One float64 number for each, on the CPU.
    """
    found = torch.zeros(len(gradients), dtype=torch.float64, device="cpu")
    for place, grad in enumerate(gradients):
        if grad is None or grad.numel() == 0:
            continue
        seen = grad.detach()
        if seen.layout != torch.strided:
            seen = seen.coalesce().values()
        if seen.numel() == 0:
            continue
        seen = seen.abs() if seen.is_complex() else seen
        norm = float(torch.linalg.vector_norm(seen, order, dtype=torch.float64).item())
        found[place] = norm if order == math.inf else norm**order
    return found


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
    for grads in _alike(gradients):
        torch._foreach_mul_(grads, factor)


def unscale_(gradients: Iterable[Tensor | None], scale: float) -> bool:
    """Divide gradients by GradScaler's scale, in place, as it does: by the inverse.

    Returns:
        Whether some element is not finite.
    """
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float()
    is_infinite = False
    for grads in _alike(gradients):
        device = grads[0].device
        found = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse.to(device))
        is_infinite = is_infinite or bool(found.item())
    return is_infinite


def _alike(gradients: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """The values of gradients, those of one device and dtype together, without autograd."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in gradients:
        if grad is not None:
            # Values that are not coalesced yet are scaled as well as their sum.
            own = grad._values() if grad.is_sparse else grad  # noqa: SLF001  values() wants it coalesced
            found.setdefault((own.device, own.dtype), []).append(own.detach())
    return list(found.values())
