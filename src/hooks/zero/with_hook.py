"""torch's two hooks for ZeRO under DDP: any inner hook, then steps of what each rank owns."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim.core.compiling import uncompiled
from hooks.driver import Hook
from hooks.zero.checks import sharded_paths
from hooks.zero.overlap import Overlap, OverlapOptions, gathers_on
from sharding import ZeroRedundancyOptimizer
from sharding.transport import gather_group, make_transport


class ZeroHook:
    """A DDP communication hook that steps a ZeroRedundancyOptimizer; made by the functions here.

    Example::

        >>> from sharding import ZeroRedundancyOptimizer
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> zero = ZeroRedundancyOptimizer(
        ...     ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1e-3)
        >>> hook = hook_with_zero_step(
        ...     default_hooks.allreduce_hook, ddp, zero, max_norm=1.0)
        >>> ddp.register_comm_hook(None, hook)
        >>> ddp(torch.full((1, 2), 2.0)).sum().backward()
        >>> round(hook.norm.item(), 6)  # of the gradients [[2.0, 2.0]] and [1.0]
        3.0
        >>> dist.destroy_process_group()
    """

    def __init__(self, name: str, overlap: Overlap, call: Hook) -> None:
        # As DDP asks of a function.
        self.__name__ = self.__qualname__ = name
        self._overlap = overlap
        self._call = call

    @uncompiled
    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """As ``register_comm_hook`` takes it."""
        return self._call(state, bucket)

    @property
    def norm(self) -> Tensor | None:
        """The 2-norm of all gradients in the last iteration, before clipping; a float64 tensor.

        None before the first iteration, and where none of ``max_norm``, ``skip_nonfinite`` and
        ``grad_scaler`` was given.
        """
        return self._overlap.clipping.norm

    @property
    def skipped(self) -> int:
        """Number of iterations that all ranks skipped for a gradient that was not finite."""
        return self._overlap.clipping.skipped

    def wait(self) -> None:
        """Return when all parameters are whole on this rank.

        Only ``zero_step_hook`` with ``into_forward=True`` leaves anything to wait for after
        backward, and any hook does after one that failed: call this before a checkpoint is loaded.
        """
        self._overlap.wait()


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
    """A DDP communication hook: ``hook``, and when all buckets are communicated, the step.

    Every rank has all gradients, ``g = hook(g_0, ..., g_{W-1})``, steps what it owns by ``zero``'s
    plan, ``p[owned] = step(p[owned], g[owned])``, and receives the rest from its owners. Stepping
    begins with the last bucket; parameters of the first buckets travel while later ones are
    stepped. It works from the first iteration on, over gloo and nccl, and whatever DDP's options.
    There is no ``step()`` to call; clear gradients after each backward.

    Args:
        hook: any DDP communication hook, such as ``allreduce_hook``; the state given to
            ``register_comm_hook`` is its state.
        ddp: the module that the result is registered on.
        zero: made with ``overlap_with_ddp=True``. Its ``param_groups`` are read at each step.
        shard_buckets: accepted for torch's sake. Who owns what is said by ``zero.plan``, and does
            not depend on buckets.
        max_norm: scale gradients down together where their 2-norm exceeds this, as
            ``torch.nn.utils.clip_grad_norm_`` does; exact, whatever the shards.
        skip_nonfinite: where a gradient is infinite or NaN, step nothing on any rank.
        grad_scaler: the GradScaler by which the loss is scaled: gradients are unscaled before they
            are stepped by, and what is not finite is skipped. After backward call its
            ``step(zero)``, which then only looks at gradients, and its ``update()``.
        in_order: wait for a bucket's communication before that of the next one begins; see
            :func:`hooks.step_hook`.

    Returns:
        A hook for ``ddp.register_comm_hook(inner_state, hook)``.

    Raises:
        TypeError: ``ddp`` or ``zero`` is something else.
        ValueError: ``zero`` was made without ``overlap_with_ddp=True``, for other ranks or for
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
    options = OverlapOptions(True, checked_norm(max_norm), skip_nonfinite, grad_scaler)
    return _made("hook_with_zero_step", hook, ddp, zero, options, in_order=in_order)


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
    """A DDP communication hook: ``hook``, then the bucket's step, while backward goes on.

    As :func:`hook_with_zero_step`, with the same results bit for bit, but each bucket is stepped as
    soon as it is communicated. Where all gradients are needed first (``max_norm``,
    ``skip_nonfinite``, ``grad_scaler``, a chain that clips by global norm), only squared norms are
    taken then, and all steps wait for the last bucket; so does the one step of an optimizer that
    keeps numbers for all parameters.

    Args:
        hook: any DDP communication hook.
        ddp: the module that the result is registered on.
        zero: made with ``overlap_with_ddp=True``.
        shard_buckets: accepted for torch's sake.
        max_norm: clip by global norm.
        skip_nonfinite: step nothing where a gradient is not finite.
        grad_scaler: unscale gradients, and skip what is not finite.
        in_order: wait for a bucket's communication before that of the next one begins.

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
    options = OverlapOptions(False, checked_norm(max_norm), skip_nonfinite, grad_scaler)
    return _made("hook_with_zero_step_interleaved", hook, ddp, zero, options, in_order=in_order)


def checked_norm(max_norm: float | None) -> float | None:
    """A bound for a norm, if there is one.

    Raises:
        ValueError: a negative one, or NaN.
    """
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm must be a number >= 0, or None, got {max_norm!r}")
    return None if max_norm is None else float(max_norm)


def _made(
    name: str,
    inner: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    options: OverlapOptions,
    *,
    in_order: bool,
) -> ZeroHook:
    if not callable(inner):
        raise TypeError(f"hook must be a DDP communication hook, got {type(inner).__name__}")
    sharded_paths(ddp, zero, all_of_ddp=False)  # before a group is made
    group = ddp.process_group
    gathers = make_transport(gather_group(group), gathers_on(zero))
    overlap = Overlap(ddp, zero, gathers, options, all_of_ddp=False)

    def call(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        entered, used = overlap.enter(bucket)
        with overlap.roll_call.on_failure(f"the inner hook of bucket {entered.number}"):
            communicated = overlap.driver.communicate(inner, state, bucket)
            if in_order:
                communicated.block()
        return overlap.after(entered, used, communicated.wait, ready=communicated.ready)

    return ZeroHook(name, overlap, call)
