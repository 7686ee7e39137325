"""Two modes of a ZeroRedundancyOptimizer: steps after backward, or steps from a hook."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from functional_optim.frontends.loss_scale import Scaling
from sharding.zero.join import StepWithOthers

logger = logging.getLogger(__name__)


class AfterBackward:
    """Mode in which ``step()`` steps the parameters."""

    def step(self, zero: Any, make: Callable[[], Any]) -> Any:
        Join.notify_join_context(zero)
        return make()

    def clip(self, clip: Callable[[], Tensor]) -> Tensor:
        return clip()

    def join_hook(self, step: Callable[[], Any]) -> JoinHook:
        return StepWithOthers(step)


class FromHook:
    """Mode in which a communication hook steps the parameters during backward."""

    def step(self, zero: Any, make: Callable[[], Any]) -> None:
        """Warn that nothing is done. Raise RuntimeError if the hook does not know a GradScaler."""
        scaling = Scaling.of(zero)
        if not scaling.is_scaled:
            logger.warning(
                "step() does nothing where overlap_with_ddp=True: parameters are stepped by the "
                "communication hook, while backward goes on; take the call out of the loop"
            )
        elif scaling.grad_scale is not None or not zero.hook_unscales:
            raise RuntimeError(
                "the communication hook has not unscaled gradients by this GradScaler since its "
                "last update(): if it does not know it, it has stepped by scaled gradients; give "
                "the hook grad_scaler="
            )

    def clip(self, clip: Callable[[], Tensor]) -> Tensor:
        """Raise RuntimeError: the hook has stepped the parameters already."""
        raise RuntimeError(
            "clip_grad_norm_() comes too late where overlap_with_ddp=True: the communication "
            "hook has stepped by these gradients already; give max_norm to the hook"
        )

    def join_hook(self, step: Callable[[], Any]) -> JoinHook:
        """Return a hook that does nothing: DDP's own hook runs the communication hook."""
        return JoinHook()
