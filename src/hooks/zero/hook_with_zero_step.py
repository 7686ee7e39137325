"""torch's two hooks for ZeRO under DDP: any inner hook, then a step of the owned parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hooks.communication import Communication
from hooks.driver import Hook
from hooks.zero.bucket import ZeroBucket
from hooks.zero.checks import sharded_paths
from hooks.zero.clipping import Clipping
from hooks.zero.zero_hook import ZeroHook
from sharding import ZeroRedundancyOptimizer


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    in_order: bool = False,
) -> ZeroHook:
    """Return a DDP communication hook: ``hook``, then the step when all buckets are communicated.

    Every rank has all gradients, ``g = hook(g_0, ..., g_{W-1})``, steps what it owns by ``zero``'s
    plan, ``p[owned] = step(p[owned], g[owned])``, and receives all other parameters from their
    owners. Steps start with the last bucket; parameters of the first buckets are sent while later
    buckets are stepped. The hook works from the first iteration on, over gloo and nccl, with any
    options of DDP. There is no ``step()`` to call; clear gradients after each backward.

    Args:
        hook: any DDP communication hook, such as ``allreduce_hook``; its state is the state of
            ``register_comm_hook``.
        ddp: the module on which you register the hook.
        zero: created with ``overlap_with_ddp=True``. Its ``param_groups`` are read at each step.
        shard_buckets: ignored; torch's hook has it. Owners follow from ``zero.plan``, not from
            buckets.
        max_norm: scale gradients down together if their 2-norm exceeds this, as
            ``torch.nn.utils.clip_grad_norm_`` does; exact for any shards.
        skip_nonfinite: skip the step on all ranks if a gradient is infinite or NaN.
        grad_scaler: the GradScaler of the loss: the hook unscales gradients, and skips steps with
            gradients that are not finite. After backward call its ``step(zero)``, which then only
            checks gradients, and its ``update()``.
        in_order: wait for the communication of each bucket before that of the next bucket starts;
            see :func:`hooks.step_hook`.

    Returns:
        A hook for ``ddp.register_comm_hook(inner_state, hook)``.

    Raises:
        TypeError: ``ddp`` or ``zero`` is something else.
        ValueError: ``zero`` was created without ``overlap_with_ddp=True``, for other ranks or for
            parameters that ``ddp`` does not reduce; a negative ``max_norm``.
        RuntimeError: (from backward) a parameter that came twice or never in an iteration; an
            inner hook that returns a tensor of another size; another rank died.

    Example::

        >>> from sharding import ZeroRedundancyOptimizer
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        >>> with torch.no_grad():
        ...     _ = ddp.module.weight.fill_(1.0)
        >>> zero = ZeroRedundancyOptimizer(
        ...     ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
        >>> hook = hook_with_zero_step(default_hooks.allreduce_hook, ddp, zero)
        >>> ddp.register_comm_hook(None, hook)
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> ddp.module.weight.tolist()
        [[0.5, 0.5]]
        >>> dist.destroy_process_group()
    """
    clipping = Clipping(zero, max_norm, skip_nonfinite, grad_scaler)
    name = "hook_with_zero_step"
    return _build_zero_hook(name, hook, ddp, zero, clipping, hold=True, in_order=in_order)


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    in_order: bool = False,
) -> ZeroHook:
    """Return a DDP communication hook: ``hook``, then the bucket's step, during backward.

    The results equal those of :func:`hook_with_zero_step` bit for bit, but each bucket is stepped
    as soon as it is communicated. If all gradients are needed first (``max_norm``,
    ``skip_nonfinite``, ``grad_scaler``, a chain that clips by global norm), only squared norms are
    computed then, and all steps wait for the last bucket. An optimizer with state shared by all
    parameters also waits for the last bucket, and then steps once.

    Args:
        hook: any DDP communication hook.
        ddp: the module on which you register the hook.
        zero: created with ``overlap_with_ddp=True``.
        shard_buckets: ignored; torch's hook has it.
        max_norm: clip by global norm.
        skip_nonfinite: skip the step if a gradient is not finite.
        grad_scaler: unscale gradients, and skip the step if one is not finite.
        in_order: wait for the communication of each bucket before that of the next bucket starts.

    Returns:
        A hook for ``ddp.register_comm_hook(inner_state, hook)``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`hook_with_zero_step`.

    Example::

        >>> from sharding import ZeroRedundancyOptimizer
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
        >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.5)
        >>> hook_with_zero_step_interleaved(default_hooks.allreduce_hook, ddp, zero)
        Traceback (most recent call last):
        ...
        ValueError: zero must be made with overlap_with_ddp=True to be stepped by a hook; ...
        >>> dist.destroy_process_group()
    """
    clipping = Clipping(zero, max_norm, skip_nonfinite, grad_scaler)
    name = "hook_with_zero_step_interleaved"
    return _build_zero_hook(name, hook, ddp, zero, clipping, hold=False, in_order=in_order)


def _build_zero_hook(
    name: str,
    inner: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    clipping: Clipping,
    *,
    hold: bool,
    in_order: bool,
) -> ZeroHook:
    if not callable(inner):
        raise TypeError(f"hook must be a DDP communication hook, got {type(inner).__name__}")
    sharded_paths(ddp, zero, all_of_ddp=False)  # before the collective that creates a group

    def communicate(
        own: ZeroHook, state: Any, bucket: dist.GradBucket, zero_bucket: ZeroBucket
    ) -> Communication:
        with own.guard(f"the inner hook of bucket {zero_bucket.number}"):
            return own.driver.communicate(inner, state, bucket)

    return ZeroHook(
        name, communicate, ddp, zero, clipping, hold=hold, all_of_ddp=False, in_order=in_order
    )
