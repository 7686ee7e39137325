"""Agreement of all ranks, after a backward pass, on whether the step is run.

With torch's GradScaler, a step is skipped on all ranks or on none. GradScaler calls ``step`` in any
case if the optimizer has ``_step_supports_amp_scaling``, so that all ranks come here and can agree.
Otherwise GradScaler would not call ``step`` on a rank with an infinite gradient, and the other
ranks would wait for that rank.
"""

import logging

from functional_optim.frontends.loss_scale import Scaling
from sharding.zero.collective import all_gather_bytes
from sharding.zero.join import exchange_join_status, send_to_joined
from sharding.zero.optimizer_parts import OptimizerParts

logger = logging.getLogger(__name__)


def agree_on_step(parts: OptimizerParts, scaling: Scaling, *, uneven: bool, joined: bool) -> bool:
    """Prepare gradients, and return True, on all ranks, if the step is run.

    Collective with a GradScaler, and under ``Join``: ``uneven`` is True if ranks may run out of
    data, ``joined`` if this rank has none.
    """
    status = None
    if uneven:
        status = exchange_join_status(parts, joined=joined, found_inf=scaling.found)
    skip = _is_inf_anywhere(parts, scaling) if status is None else status.skip
    if skip:
        _log_skipped(here=scaling.found)
        return False
    scaling.unscale_(param.grad for param in parts.params.values())
    if status is not None:
        send_to_joined(parts, status)
    return True


def _is_inf_anywhere(parts: OptimizerParts, scaling: Scaling) -> bool:
    """Return True if any rank has a gradient that is not finite. Collective with a scaler."""
    if scaling.found_inf is None:
        return False
    own, what = bytes([scaling.found]), "find out if gradients are finite"
    return any(map(any, all_gather_bytes(parts.process_group, parts.device, own, what, len(own))))


def _log_skipped(*, here: bool) -> None:
    if here:
        logger.info("a gradient is not finite: this step is skipped on all ranks")
        return
    logger.warning(
        "this step is skipped, since another rank has a gradient that is not finite; this one has "
        "none, so its GradScaler will not lower its scale: give all ranks the same gradients, or "
        "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
    )
