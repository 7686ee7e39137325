"""ZeRO step hook: reduce-scatter a bucket, step the owned parameters, gather parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hooks.communication import Communication
from hooks.zero.bucket import ZeroBucket, start_reduction
from hooks.zero.checks import sharded_paths
from hooks.zero.clipping import Clipping
from hooks.zero.zero_hook import ZeroHook, gather_device
from sharding import ZeroRedundancyOptimizer
from sharding.transport import make_transport

IN_FLIGHT = 3
"""Number of reductions in progress at once. Over the network, each buffers what it receives."""


def zero_step_hook(
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    deterministic: bool | None = None,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> ZeroHook:
    """Return a DDP communication hook that reduces each gradient to its owner only.

    With ``g_q`` the gradient of rank ``q`` of ``W``, for each bucket and during backward, the rank
    that owns a range of elements computes

        g[owned] = ((g_0/W + g_1/W) + g_2/W + ...)[owned]
        p[owned] = step(p[owned], g[owned])

    and sends ``p[owned]`` to all ranks, on a separate process group. In total this is as many bytes
    as DDP's all-reduce of gradients. The hook works from the first iteration on, with any options
    of DDP. There is no ``step()`` to call. Clear gradients after each backward, and do not use
    them: outside of the owned ranges, ``.grad`` is not the mean over ranks.

    **Deterministic**: over gloo, gradients are added in rank order. So trained parameters do not
    depend on the buckets, and equal bit for bit those of one process that adds the ranks' gradients
    in that order (if ``zero``'s executor steps a range as it steps the whole parameter).

    **Which plan**: with ``policy="elements"`` most buckets have one owner, which is the fastest on
    one host. With ``policy="sliced"`` every rank owns a part of every bucket. So all ranks send and
    receive all the time, and no rank waits for another one's step.

    **On one host** ranks exchange through shared memory (see
    :class:`~sharding.transport.SharedMemoryTransport`), and send almost nothing.

    Args:
        ddp: the module on which you register the hook.
        zero: created with ``overlap_with_ddp=True``, for all parameters that ``ddp`` reduces. Its
            ``param_groups`` are read at each step. If its chain has state shared by all parameters
            (accumulation, Schedule-Free, Prodigy), it steps once, with the last bucket.
        deterministic: True to require sums in rank order; an error if the backend has another
            order (nccl). None accepts any order.
        max_norm: scale gradients down together if their 2-norm exceeds this, as
            ``torch.nn.utils.clip_grad_norm_`` does. Squares are summed during backward; steps
            follow once the total is known.
        skip_nonfinite: skip the step on all ranks if a gradient is infinite or NaN.
        grad_scaler: the GradScaler of the loss: the hook unscales gradients, and skips steps with
            gradients that are not finite. After backward call its ``step(zero)``, which then only
            checks gradients, and its ``update()``.

    Returns:
        A hook for ``ddp.register_comm_hook(None, hook)``.

    Raises:
        TypeError: ``ddp`` or ``zero`` has another type.
        ValueError: ``zero`` was created without ``overlap_with_ddp=True``, for other ranks, other
            parameters, or by a plan with replicas; a negative ``max_norm``; ``deterministic=True``
            on a backend with another order.
        RuntimeError: (from backward) a parameter that was reduced twice, or never, in an iteration;
            another rank died or is missing. The error names it.

    Example::

        >>> from sharding import ZeroRedundancyOptimizer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        >>> with torch.no_grad():
        ...     _ = ddp.module.weight.fill_(1.0)
        >>> zero = ZeroRedundancyOptimizer(
        ...     ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
        >>> ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> ddp.module.weight.tolist()
        [[0.5, 0.5]]
        >>> dist.destroy_process_group()

    Reference:
        Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory optimizations toward training trillion
        parameter models", SC 2020, section 5 (stages 1 and 2).
    """
    clipping = Clipping(zero, max_norm, skip_nonfinite, grad_scaler)
    sharded_paths(ddp, zero, all_of_ddp=True)  # before the collective that creates a group
    if zero.plan.replicas > 1:
        raise ValueError(
            f"zero's plan has {zero.plan.replicas} replicas, and a reduction has one owner for "
            "each element; use hook_with_zero_step, whose inner hook reduces to all ranks"
        )
    reductions = make_transport(ddp.process_group, gather_device(zero), in_flight=IN_FLIGHT)
    if deterministic and not reductions.rank_ordered:
        raise ValueError(
            "deterministic=True needs sums in rank order, which "
            f"{dist.get_backend(ddp.process_group)} does not give; gloo does"
        )

    def communicate(
        own: ZeroHook, state: Any, bucket: dist.GradBucket, zero_bucket: ZeroBucket
    ) -> Communication:
        return Communication(start_reduction(reductions, zero_bucket), lambda: zero_bucket.buffer)

    name = "zero_step_hook"
    return ZeroHook(name, communicate, ddp, zero, clipping, hold=False, all_of_ddp=True)
