"""Treatment of gradients once all are there: they are unscaled, clipped, or not stepped by."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.amp import GradScaler

from functional_optim.frontends.gradient_norms import clip, scale_
from functional_optim.frontends.loss_scale import record, unscaled
from sharding import ZeroRedundancyOptimizer


class Clipping:
    """Clipping of a hook, from iteration to iteration; the same on all ranks.

    Args:
        zero: whose gradients.
        max_norm: scale all gradients down together where their norm exceeds this; at least 0.
        skip_nonfinite: step nothing in an iteration with a gradient that is not finite.
        scaler: what the loss was scaled by.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        max_norm: float | None,
        skip_nonfinite: bool,
        scaler: GradScaler | None,
    ) -> None:
        self._zero = zero
        self._max_norm = math.inf if max_norm is None else max_norm
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._may_skip = skip_nonfinite or self._scaler is not None
        self.is_needed = max_norm is not None or self._may_skip
        """Whether there is anything to do, for which all gradients have to be there."""
        self.norm: Tensor | None = None
        """The norm of all gradients in the last iteration, where it was asked for."""
        self.skipped = 0
        """How many iterations were skipped."""
        zero.hook_unscales = scaler is not None

    def apply(self, gradients: Sequence[Tensor], squares: float, *, without_data: bool) -> bool:
        """Return True if gradients are to be stepped by; they are unscaled, and then clipped.

        Args:
            gradients: of this rank.
            squares: the sum of all ranks' squares of what they step.
            without_data: this rank takes part for the others' sake: nobody calls its scaler.
        """
        is_finite = math.isfinite(squares)
        scale = 1.0
        if self._scaler is not None:
            scale = self._unscale(self._scaler, gradients, not is_finite, without_data)
        measured = squares / scale / scale
        if self._may_skip and not is_finite:
            self.norm = torch.tensor(measured, dtype=torch.float64, device="cpu").sqrt()
            self.skipped += 1
            return False
        norm = clip(lambda _: [measured], partial(scale_, gradients), self._max_norm)
        self.norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
        return True

    def _unscale(
        self, scaler: GradScaler, gradients: Sequence[Tensor], found: bool, without_data: bool
    ) -> float:
        """Unscale gradients, and tell the scaler what all ranks found; by what they are divided."""

        def unscale(scale: float) -> bool:
            unscaled(gradients, scale)
            return found

        if without_data:
            scaler.scale(torch.ones((), device=self._zero.join_device))  # it may be its first
        scale = scaler.get_scale()
        record(scaler, self._zero, unscale)
        if without_data:
            scaler.update()  # as the others do, so that the next scale is theirs
        return scale
