"""Unscaling and clipping of complete gradients, or a skipped step."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.amp import GradScaler

from functional_optim.engine.gradients import check_and_unscale_, clip, record_unscale, scale_
from sharding import ZeroRedundancyOptimizer


class Clipping:
    """Clipping of a hook, with the same result on all ranks.

    Args:
        zero: the optimizer.
        max_norm: scale all gradients down together if their norm exceeds this.
        skip_nonfinite: skip the step if a gradient is not finite.
        scaler: that scaled the loss.

    Raises:
        ValueError: ``max_norm`` is negative or NaN.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        max_norm: float | None,
        skip_nonfinite: bool,
        scaler: GradScaler | None,
    ) -> None:
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"max_norm must be a number >= 0, or None, got {max_norm!r}")
        self._zero = zero
        self._max_norm = math.inf if max_norm is None else float(max_norm)
        self.has_scaler = scaler is not None
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._may_skip = skip_nonfinite or self._scaler is not None
        self.is_needed = max_norm is not None or self._may_skip
        """True if the hook needs all gradients before the first step, to clip, unscale or skip."""
        self.norm: Tensor | None = None
        """The norm of all gradients in the last iteration, if ``is_needed``."""
        self.skipped = 0
        """Number of skipped iterations."""

    def apply(self, gradients: Sequence[Tensor], squares: float, *, without_data: bool) -> bool:
        """Unscale and clip gradients; return False if the step is to be skipped.

        Args:
            gradients: of this rank.
            squares: the sum of squares of all gradients, over all ranks.
            without_data: True if this rank has no data left and only takes part in collectives, so
                that its training loop does not call the scaler.
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
        """Unscale gradients, pass the finding of all ranks to the scaler, and return the scale."""

        def unscale(scale: float) -> bool:
            check_and_unscale_(gradients, scale)
            return found

        if without_data:
            scaler.scale(torch.ones((), device=self._zero.join_device))  # creates the scale
        scale = scaler.get_scale()
        record_unscale(scaler, self._zero, unscale)
        if without_data:
            scaler.update()  # as on the other ranks, so that scales stay equal
        return scale
