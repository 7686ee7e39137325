"""A step under GradScaler: gradients are unscaled once, and none is stepped that is not finite.

Wherever gradients are, this is what there is to it:

=====================  ==============================================================
an element that is     the step is left out, on all ranks and workers, and is counted
not finite             by no leaf; ``scaler.update()`` then lowers the scale
a second unscale       an error, until ``scaler.update()``
None; an empty one     nothing to unscale, nothing found
16 bits                multiplied in float32
sparse                 the elements that it holds
several devices        unscaled and looked at on each
=====================  ==============================================================

``TorchOptimizer`` has none of it: GradScaler unscales its ``.grad``, and does not call its step.
Other optimizers are told by GradScaler (:class:`Scaling`), or tell it (:func:`record`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from functional_optim._torch import (
    amp_foreach_non_finite_check_and_unscale_,
    has_scaled,
    scaler_state,
)
from functional_optim.frontends.gradient_norms import alike


class Scaling(NamedTuple):
    """Attributes that GradScaler sets on an optimizer for the call of its step."""

    grad_scale: Tensor | None
    """What gradients are still to be divided by; None where ``unscale_()`` has done it."""
    found_inf: Tensor | None
    """Not zero where a gradient of this process is not finite; None where no GradScaler calls."""

    @classmethod
    def of(cls, optimizer: Any) -> "Scaling":
        """Return the current attributes of an optimizer."""
        return cls(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))

    @property
    def is_scaled(self) -> bool:
        """Return True if a GradScaler calls."""
        return self.found_inf is not None

    @property
    def found(self) -> bool:
        """Return True if a gradient of this process is not finite."""
        return self.found_inf is not None and bool(self.found_inf.item())

    def unscale_(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by what they are still to be divided by."""
        if self.grad_scale is not None:
            unscale_(gradients, self.grad_scale)


def record(scaler: GradScaler, optimizer: Any, unscale: Callable[[float], bool]) -> bool:
    """Unscale gradients, and leave with a scaler what was found, as its own ``unscale_`` does.

    ``scaler.step(optimizer)`` and ``scaler.update()`` then act on it. Where ``unscale`` fails, some
    gradients may be unscaled: then none is stepped by, and none is unscaled again.

    Args:
        scaler: torch's.
        optimizer: that has the gradients.
        unscale: divides them by a scale, and says whether some are not finite.

    Returns:
        Whether some are not finite.

    Raises:
        RuntimeError: gradients were unscaled since the last ``update``, or no loss was scaled.
    """
    if not scaler.is_enabled():
        return False
    if not has_scaled(scaler):
        raise RuntimeError(
            "no loss was scaled by this GradScaler, so gradients cannot be unscaled by it; call "
            "scaler.scale(loss).backward() with the scaler that is given here"
        )
    state = scaler_state(scaler, optimizer)
    if state["stage"] is not OptState.READY:
        raise RuntimeError(
            "unscale_() was already called on this optimizer since the last update(); gradients "
            "are unscaled once: call scaler.step(optimizer) and scaler.update() for each step"
        )
    _tell(state, found=True)
    found = unscale(scaler.get_scale())
    _tell(state, found=found)
    return found


def _tell(state: dict[str, Any], *, found: bool) -> None:
    flag = torch.tensor(float(found), dtype=torch.float32, device="cpu")
    state["found_inf_per_device"] = {flag.device: flag}
    state["stage"] = OptState.UNSCALED


def unscaled(gradients: Sequence[Tensor | None], scale: float) -> bool:
    """Divide gradients by a scale, in place; whether some are not finite."""
    number = torch.tensor(scale, dtype=torch.float64)
    return any(bool(one.item()) for one in unscale_(gradients, number))


def unscale_(gradients: Iterable[Tensor | None], scale: Tensor) -> list[Tensor]:
    """Divide gradients by GradScaler's scale, in place, as it does: by the inverse.

    Returns:
        Numbers, one of which is not 0 where some element is not finite.
    """
    inverse = scale.double().reciprocal().float()
    found = []
    for grads in alike(gradients):
        device = grads[0].device
        is_infinite = torch.zeros((), dtype=torch.float32, device=device)
        amp_foreach_non_finite_check_and_unscale_(grads, is_infinite, inverse.to(device))
        found.append(is_infinite)
    return found
