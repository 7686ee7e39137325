"""A step under torch's GradScaler: skipped on all ranks or on none.

GradScaler hands ``grad_scale`` and ``found_inf`` to an optimizer that says it takes them, and calls
its ``step`` in any case: so every rank comes here, and they can agree. An optimizer that does not
say so is not called on a rank that found an infinity, and the others would wait for it.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.frontends.gradient_norms import unscale_
from sharding.zero.parts import Parts

logger = logging.getLogger(__name__)


class Scaling(NamedTuple):
    """What GradScaler has put on the optimizer for this step."""

    grad_scale: Tensor | None
    """What gradients are still to be divided by."""
    found_inf: Tensor | None
    """Not zero where a gradient of this rank is not finite."""

    @property
    def found(self) -> bool:
        """Whether this rank found one."""
        return self.found_inf is not None and bool(self.found_inf.item())


def found_anywhere(parts: Parts, scaling: Scaling) -> bool:
    """Whether any rank found a gradient that is not finite. Collective, if there is a scaler."""
    if scaling.found_inf is None:
        return False
    flag = scaling.found_inf.detach().reshape(1).to(parts.device, torch.float32, copy=True)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=parts.process_group)
    return bool(flag.item())


def say_skipped(*, here: bool) -> None:
    """Log what kind of a step is skipped."""
    if here:
        logger.info("a gradient is not finite: this step is skipped on all ranks")
        return
    logger.warning(
        "this step is skipped, since another rank has a gradient that is not finite; this one has "
        "none, so its GradScaler will not lower its scale: give all ranks the same gradients, or "
        "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
    )


def unscale(params: Iterable[Tensor], scaling: Scaling) -> None:
    """Divide gradients by the scale, as GradScaler does it: in place, by its inverse."""
    if scaling.grad_scale is None:
        return
    unscale_((param.grad for param in params), scaling.grad_scale)
