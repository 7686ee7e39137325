"""Two modes of a ZeroRedundancyOptimizer: steps after backward, or from a hook."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from functional_optim.frontends.loss_scale import Scaling
from sharding.zero.join import StepWithOthers

logger = logging.getLogger(__name__)


class Mode(Protocol):
    """Behaviour of ``step()``, ``clip_grad_norm_()`` and ``join_hook()``."""

    def step(self, zero: Any, make: Callable[[], Any]) -> Any:
        """Answer a call of ``step()``; ``make`` makes a step on all ranks."""

    def clip(self, clip: Callable[[], Tensor]) -> Tensor:
        """Answer a call of ``clip_grad_norm_()``; ``clip`` clips."""

    def join_hook(self, step: Callable[[], Any]) -> JoinHook:
        """Return what a rank without data does under ``Join``; ``step`` steps with the others."""


class AfterBackward:
    """Steps are made by ``step()``."""

    def step(self, zero: Any, make: Callable[[], Any]) -> Any:
        """Make the step."""
        Join.notify_join_context(zero)
        return make()

    def clip(self, clip: Callable[[], Tensor]) -> Tensor:
        """Clip."""
        return clip()

    def join_hook(self, step: Callable[[], Any]) -> JoinHook:
        """Return a hook that steps with the ranks that have data."""
        return StepWithOthers(step)


class FromHook:
    """Steps are made by a communication hook, while backward goes on."""

    def step(self, zero: Any, make: Callable[[], Any]) -> None:
        """Say that there is nothing to do, unless a GradScaler calls.

        Raises:
            RuntimeError: the hook does not know the GradScaler, and has stepped by scaled
                gradients.
        """
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
        """Refuse: steps were made.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "clip_grad_norm_() comes too late where overlap_with_ddp=True: the communication "
            "hook has stepped by these gradients already; give max_norm to the hook"
        )

    def join_hook(self, step: Callable[[], Any]) -> JoinHook:
        """Return a hook that does nothing: DDP's own runs the communication hook, and so steps."""
        return JoinHook()
