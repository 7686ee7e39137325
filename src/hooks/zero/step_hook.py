"""The ZeRO hook: reduce-scatter a bucket, step what this rank owns of it, gather parameters."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hooks.zero.checks import sharded_paths
from hooks.zero.overlap import Overlap, OverlapOptions, gathers_on
from hooks.zero.reduction import Reduction
from hooks.zero.waiting import ForwardWaits, WaitFor
from hooks.zero.with_hook import ZeroHook, checked_norm
from sharding import ZeroRedundancyOptimizer
from sharding.transport import Transport, gather_group, make_transport

IN_FLIGHT = 3
"""Reductions under way at once. Over the network, each holds what it receives."""


def zero_step_hook(
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    deterministic: bool | None = None,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    into_forward: bool = False,
) -> ZeroHook:
    """A DDP communication hook that reduces each gradient to its owner, and nowhere else.

    With ``g_q`` the gradient of rank ``q`` of ``W``, for each bucket, while backward goes on, the
    rank that owns a range of elements makes

        g[owned] = ((g_0/W + g_1/W) + g_2/W + ...)[owned]
        p[owned] = step(p[owned], g[owned])

    and sends ``p[owned]`` to all others, on a process group of its own. Together that is as many
    bytes as DDP's all-reduce of gradients. It works from the first iteration on, whatever DDP's
    options. There is no ``step()`` to call; clear gradients after each backward: outside of what a
    rank owns, ``.grad`` holds that rank's own gradient, divided by W or not.

    **Deterministic**: over gloo, gradients are added in rank order, so trained parameters do not
    depend on the buckets, and are bit for bit those of one process that adds the ranks' gradients
    in that order (as far as ``zero``'s executor steps a range as it steps the whole).

    **Which plan**: with ``policy="elements"`` most buckets go to one rank as a whole, which is the
    fastest on one host. With ``policy="sliced"`` every rank has a part of every bucket, so that all
    send and receive all the time, and none waits for another to step one.

    **On one host** ranks exchange through memory that they share (see
    :class:`~sharding.transport.SharedMemoryTransport`), and send next to nothing.

    Args:
        ddp: the module that the result is registered on.
        zero: made with ``overlap_with_ddp=True``, for all parameters that ``ddp`` reduces. Its
            ``param_groups`` are read at each step. Where it keeps numbers for all parameters
            (accumulation, Schedule-Free, Prodigy), one step is made with the last bucket.
        deterministic: True asks for sums in rank order, and is refused where the backend has its
            own order (nccl); None takes what the backend gives.
        max_norm: scale gradients down together where their 2-norm exceeds this, as
            ``torch.nn.utils.clip_grad_norm_`` does. Squares are summed while backward runs; steps
            are made once the total is known.
        skip_nonfinite: where a gradient is infinite or NaN, step nothing on any rank.
        grad_scaler: the GradScaler by which the loss is scaled: gradients are unscaled before they
            are stepped by, and what is not finite is skipped. After backward call its
            ``step(zero)``, which then only looks at gradients, and its ``update()``.
        into_forward: let gathers run on into the next forward pass, and wait before each module
            for its parameters (and before state_dict and load_state_dict). Whoever reads
            parameters in another way first calls the hook's ``wait()``. By default backward ends
            when all parameters are whole, and always where ranks may run out of data
            (``ddp.join()``).

    Returns:
        A hook for ``ddp.register_comm_hook(None, hook)``.

    Raises:
        TypeError: ``ddp`` or ``zero`` is something else.
        ValueError: ``zero`` was made without ``overlap_with_ddp=True``, for other ranks, other
            parameters, or by a plan with replicas; a negative ``max_norm``; ``deterministic=True``
            on a backend without it.
        RuntimeError: (from backward) a parameter that came twice or never in an iteration; another
            rank died or did not come, by its number.

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
    options = OverlapOptions(
        False, checked_norm(max_norm), skip_nonfinite, grad_scaler, into_forward
    )
    paths = sharded_paths(ddp, zero, all_of_ddp=True)
    if zero.plan.replicas > 1:
        raise ValueError(
            f"zero's plan has {zero.plan.replicas} replicas, and a reduction has one owner for "
            "each element; use hook_with_zero_step, whose inner hook reduces to all ranks"
        )
    device = gathers_on(zero)
    reductions = _reductions(ddp.process_group, device)
    if deterministic and not reductions.rank_ordered:
        raise ValueError(
            "deterministic=True needs sums in rank order, which "
            f"{dist.get_backend(ddp.process_group)} does not give; gloo does"
        )
    gathers = make_transport(gather_group(ddp.process_group), device)
    overlap = Overlap(ddp, zero, gathers, options, all_of_ddp=True)
    if into_forward:
        overlap.handles += ForwardWaits(ddp.module, paths, _weakly(overlap)).handles

    def call(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        entered, used = overlap.enter(bucket)
        return overlap.after(entered, used, Reduction(reductions, entered).wait)

    return ZeroHook("zero_step_hook", overlap, call)


def _weakly(overlap: Overlap) -> WaitFor:
    """Its ``wait_for``, by which a module does not keep it, and with it all state, alive."""
    found = weakref.ref(overlap)

    def wait_for(params: Iterable[Tensor]) -> None:
        waiting = found()
        if waiting is not None:
            waiting.wait_for(params)

    return wait_for


def _reductions(group: dist.ProcessGroup, device: Any) -> Transport:
    return make_transport(group, device, in_flight=IN_FLIGHT)
