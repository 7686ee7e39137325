"""Between a backward pass and a step: what the ranks agree on first.

Under torch's GradScaler a step is skipped on all ranks or on none. GradScaler hands what it found
to an optimizer that says it takes it, and calls its ``step`` in any case: so every rank comes here,
and they can agree. An optimizer that does not say so is not called on a rank that found an
infinity, and the others would wait for it.
"""

import logging

import torch
import torch.distributed as dist

from functional_optim.frontends.loss_scale import Scaling
from sharding.zero.join import hand_over, told
from sharding.zero.parts import OptimizerParts

logger = logging.getLogger(__name__)


def agreed_on_step(parts: OptimizerParts, scaling: Scaling, *, uneven: bool, joined: bool) -> bool:
    """Make gradients ready for a step. Collective, where there is a scaler, or under ``Join``.

    Args:
        parts: of the optimizer.
        scaling: what GradScaler has put on it.
        uneven: whether ranks may run out of data.
        joined: whether this one has.

    Returns:
        Whether the step is to be made: the same on all ranks.
    """
    turn = told(parts, joined=joined, found_inf=scaling.found) if uneven else None
    skip = _found_anywhere(parts, scaling) if turn is None else turn.skip
    if skip:
        _say_skipped(here=scaling.found)
        return False
    scaling.unscale_(param.grad for param in parts.params.values())
    if turn is not None:
        hand_over(parts, turn)
    return True


def _found_anywhere(parts: OptimizerParts, scaling: Scaling) -> bool:
    """Return True if any rank has a gradient that is not finite. Collective with a scaler."""
    if scaling.found_inf is None:
        return False
    flag = scaling.found_inf.detach().reshape(1).to(parts.device, torch.float32, copy=True)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=parts.process_group)
    return bool(flag.item())


def _say_skipped(*, here: bool) -> None:
    """Log what kind of a step is skipped."""
    if here:
        logger.info("a gradient is not finite: this step is skipped on all ranks")
        return
    logger.warning(
        "this step is skipped, since another rank has a gradient that is not finite; this one has "
        "none, so its GradScaler will not lower its scale: give all ranks the same gradients, or "
        "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
    )
