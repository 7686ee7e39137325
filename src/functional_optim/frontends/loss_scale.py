"""Support for GradScaler: unscale gradients once, and skip steps with infinite gradients.

The rules are the same for all front-ends:

======================  ==========================================================================
an element is infinite  the step is skipped on all ranks and workers, and no step count increases;
or NaN                  ``scaler.update()`` then lowers the scale
a second unscale        an error, until ``scaler.update()``
None; empty gradient    nothing to unscale
16-bit gradient         multiplied in float32
sparse gradient         its stored elements are unscaled
several devices         gradients are unscaled and checked on each device
======================  ==========================================================================

``TorchOptimizer`` needs none of this: GradScaler unscales its ``.grad``, or does not call ``step``.
For other optimizers, GradScaler sets attributes (:class:`Scaling`), or the optimizer tells
GradScaler what it found (:func:`record_unscale`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from functional_optim._torch.modules import has_scaled, scaler_state
from functional_optim._torch.operators import amp_foreach_non_finite_check_and_unscale_
from functional_optim.frontends.gradient_norms import group_by_dtype


class Scaling(NamedTuple):
    """Attributes that GradScaler sets on an optimizer for the call of its step."""

    grad_scale: Tensor | None
    """The divisor of the gradients; None if ``unscale_()`` has already divided them."""
    found_inf: Tensor | None
    """Nonzero if a gradient of this process is not finite; None if no GradScaler calls ``step``."""

    @classmethod
    def of(cls, optimizer: Any) -> "Scaling":
        """Return the current attributes of an optimizer."""
        return cls(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))

    @property
    def is_scaled(self) -> bool:
        """Return True if a GradScaler calls ``step``."""
        return self.found_inf is not None

    @property
    def found(self) -> bool:
        """Return True if a gradient of this process is not finite."""
        return self.found_inf is not None and bool(self.found_inf.item())

    def unscale_(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by the scale, unless ``unscale_()`` has already done so."""
        if self.grad_scale is not None:
            unscale_(gradients, self.grad_scale)


def record_unscale(scaler: GradScaler, optimizer: Any, unscale: Callable[[float], bool]) -> bool:
    """Unscale gradients, and record in a GradScaler if they are finite, as its ``unscale_`` does.

    ``scaler.step(optimizer)`` and ``scaler.update()`` read this record. If ``unscale`` raises an
    error, some gradients may be unscaled. The scaler then skips the step, and refuses to unscale
    them again. Return True if any gradient is not finite.
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
    _set_unscaled(state, found_inf=True)
    found = unscale(scaler.get_scale())
    _set_unscaled(state, found_inf=found)
    return found


def _set_unscaled(state: dict[str, Any], *, found_inf: bool) -> None:
    flag = torch.tensor(float(found_inf), dtype=torch.float32, device="cpu")
    state["found_inf_per_device"] = {flag.device: flag}
    state["stage"] = OptState.UNSCALED


def check_and_unscale_(gradients: Sequence[Tensor | None], scale: float) -> bool:
    """Divide gradients by a scale in place; return True if any is not finite."""
    number = torch.tensor(scale, dtype=torch.float64)
    return any(bool(one.item()) for one in unscale_(gradients, number))


def unscale_(gradients: Iterable[Tensor | None], scale: Tensor) -> list[Tensor]:
    """Multiply gradients in place by the inverse of GradScaler's scale.

    Return a 0-d tensor for each device and dtype, nonzero if an element is not finite.
    """
    inverse = scale.double().reciprocal().float()  # as GradScaler computes it
    found = []
    for grads in group_by_dtype(gradients):
        device = grads[0].device
        is_infinite = torch.zeros((), dtype=torch.float32, device=device)
        amp_foreach_non_finite_check_and_unscale_(grads, is_infinite, inverse.to(device))
        found.append(is_infinite)
    return found
