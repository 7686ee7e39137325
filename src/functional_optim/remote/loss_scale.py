"""torch's GradScaler, told of gradients that it cannot see."""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from functional_optim._torch import scaler_state


def record(scaler: GradScaler, optimizer: Any, unscale: Callable[[float], bool]) -> bool:
    """Unscale gradients, and leave with a scaler what was found, as its own ``unscale_`` does.

    ``scaler.step(optimizer)`` and ``scaler.update()`` then act on it.

    Args:
        scaler: torch's.
        optimizer: that has the gradients.
        unscale: divides them by a scale, and says whether some are not finite.

    Returns:
        Whether some are not finite.

    Raises:
        RuntimeError: gradients were unscaled since the last ``update``.
    """
    if not scaler.is_enabled():
        return False
    state = scaler_state(scaler, optimizer)
    if state["stage"] is not OptState.READY:
        raise RuntimeError(
            "unscale_() was already called on this optimizer since the last update(); gradients "
            "are unscaled once"
        )
    found = unscale(scaler.get_scale())
    state["found_inf_per_device"] = {
        torch.device("cpu"): torch.tensor(float(found), dtype=torch.float32)
    }
    state["stage"] = OptState.UNSCALED
    return found
