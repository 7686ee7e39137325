"""Training loop for torch's ZeroRedundancyOptimizer and hook, and for ours.

torch's hooks refuse gloo, because the interleaved hook may hang. The loop disables this check while
it creates a hook, except in the test of the check. It runs only torch's other hook, which
broadcasts after the last bucket, in the same order on all ranks. All other code is torch's own.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hooks
import sharding
from tests.ddp import comparison, models, twins

TORCH = "torch"
OURS = ("zero_step_hook", "hook_with_zero_step", "hook_with_zero_step_interleaved")
SIDES = (TORCH, *OURS)
"""torch's class with its ``hook_with_zero_step``, and our class with each of our hooks."""

LR = 0.1
Groups = Callable[[nn.Module], Any]


def zero_class(side: str) -> Any:
    """Return the class of torch, or ours."""
    if side != TORCH:
        return sharding.ZeroRedundancyOptimizer
    with warnings.catch_warnings():
        # torch's import of its functional optimizers warns that TorchScript is deprecated.
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer


def make_hook(side: str, ddp: DistributedDataParallel, zero: Any, *, on_gloo: bool = True) -> Any:
    """Return a hook; torch's check of the backend is disabled if ``on_gloo``."""
    if side == "zero_step_hook":
        return hooks.zero_step_hook(ddp, zero)
    if side != TORCH:
        return getattr(hooks, side)(allreduce_hook, ddp, zero)
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    unchecked = mock.patch.object(dist, "get_backend", return_value=dist.Backend.NCCL)
    with unchecked if on_gloo else nullcontext():
        return ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, zero)


def every(module: nn.Module) -> list[Tensor]:
    """Return all parameters as one group."""
    return list(module.parameters())


class Overlapped:
    """Module under DDP that a hook steps during backward."""

    def __init__(
        self,
        side: str,
        *,
        group: dist.ProcessGroup | None = None,
        groups: Groups = every,
        model: Callable[[], nn.Module] = models.Tower,
        ddp: Any = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        module = model()
        self.start = copy.deepcopy(module)
        self.groups = groups
        self.options = {"lr": LR, **options}
        self.arguments = {"process_group": group, "bucket_cap_mb": 0.03, **(ddp or {})}
        self.ddp = DistributedDataParallel(module, **self.arguments)
        self.zero = zero_class(side)(
            groups(module),
            torch.optim.SGD,
            process_group=group,
            overlap_with_ddp=True,
            **self.options,
        )
        hook = make_hook(side, self.ddp, self.zero)
        self.ddp.register_comm_hook(self.ddp.process_group, hook)
        self.rates: list[float | None] = []

    def iterate(self, lr: float | None = None) -> int:
        """Run an iteration, with a new learning rate if any; return the count of moved ones."""
        for group in self.zero.param_groups if lr is not None else ():
            group["lr"] = lr
        before = comparison.copied(self.ddp)
        twins.backward(self.ddp, len(self.rates))
        self.rates.append(lr)
        self.ddp.zero_grad()
        return len(comparison.moved(before, self.ddp))

    def as_plain(self) -> bool:
        """Return True if the parameters are bit for bit those of DDP with torch.optim."""
        ddp = DistributedDataParallel(self.start, **self.arguments)
        optimizer = torch.optim.SGD(self.groups(self.start), foreach=False, **self.options)
        for number, lr in enumerate(self.rates):
            for group in optimizer.param_groups if lr is not None else ():
                group["lr"] = lr
            twins.backward(ddp, number)
            optimizer.step()
            ddp.zero_grad()
        pairs = zip(ddp.parameters(), self.ddp.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


def raised(action: Callable[[], object]) -> str:
    """Return ``Type: first sentence`` of the error of an action, or an empty string."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  the test says which it should be
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text.split('. ')[0]}"
    return ""
