"""Step hook: communicate a bucket, then step its parameters, while backward continues."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim import State
from functional_optim.engine.calls import disable_compile
from hooks.buckets import bucket_gradients
from hooks.driver import BucketDriver, Hook
from hooks.optimizer_state import OptimizerState
from hooks.profiling import named_range

RANGE = "functional_optim.step_hook"
"""Name of a step in traces of torch.profiler."""


@overload
def step_hook(
    ddp: DistributedDataParallel,
    optimizer: Any,
    *,
    inner_hook: Hook = ...,
    inner_state: Any = ...,
    in_order: bool = ...,
    params: Mapping[str, Tensor] | None = ...,
    state: State | None = ...,
    executor: str | None = ...,
    **options: Any,
) -> OptimizerState: ...


@overload
def step_hook(ddp: OptimizerState, optimizer: Hook = ..., *, in_order: bool = ...) -> Hook: ...


def step_hook(
    ddp: Any,
    optimizer: Any = None,
    *,
    inner_hook: Hook = allreduce_hook,
    inner_state: Any = None,
    in_order: bool = False,
    params: Mapping[str, Tensor] | None = None,
    state: State | None = None,
    executor: str | None = None,
    **options: Any,
) -> OptimizerState | Hook:
    """Register a DDP communication hook that reduces each bucket, then steps its parameters.

    The result equals that of DDP followed by the same optimizer, from the first iteration on. This
    also holds with ``find_unused_parameters`` and ``static_graph``, and after DDP rebuilds its
    buckets: a parameter that no rank used is not stepped. There is no ``step()`` to call. Clear
    gradients (``ddp.zero_grad()``) after each backward; otherwise the hook warns once. A chain that
    needs all gradients, such as one that clips by global norm, steps with the last bucket.

    Args:
        ddp: the module, without a communication hook.
        optimizer: any :class:`functional_optim.Optimizer`, or a constructor of one; or a class of
            torch.optim, or a registered one, with that class's options.
        inner_hook: any DDP communication hook (allreduce, fp16 and bf16 compression, PowerSGD).
        inner_state: the state of ``inner_hook``, as for ``register_comm_hook``.
        in_order: True to communicate the buckets one after the other, without overlap. Inner hooks
            that start collectives from callbacks need this, such as torch's PowerSGD. Otherwise,
            with several buckets on gloo, the order of these collectives depends on timing and
            differs between ranks.
        params: the parameters to step, by name; by default all of ``ddp.module``.
        state: the state to continue from; by default the state before the first step.
        executor: name of the executor for the chain; by default that of ``optimizer``.
        options: of the class or constructor, by name.

    Returns:
        The :class:`~hooks.OptimizerState`, for schedulers, hyper-parameters and checkpoints.
        ``step_hook(optimizer_state)``, which returns an unregistered hook, is deprecated.

    Raises:
        TypeError, ValueError: as for :class:`~hooks.OptimizerState`.
        RuntimeError: ``ddp`` has a communication hook.
        RuntimeError: (from backward) a parameter that is stepped twice, or never, in an iteration;
            an inner hook that returns a tensor of another size than its bucket.

    Example::

        >>> import torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from functional_optim import sgd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        >>> with torch.no_grad():
        ...     _ = ddp.module.weight.fill_(1.0)
        >>> state = step_hook(ddp, sgd(lr=0.5))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> state.zero_grad()
        >>> ddp.module.weight.tolist()
        [[0.5, 0.5]]
        >>> dist.destroy_process_group()
    """
    if isinstance(ddp, OptimizerState):
        warnings.warn(
            "step_hook(optimizer_state) is deprecated: step_hook(ddp, optimizer) makes the state, "
            "registers the hook and returns the state",
            DeprecationWarning,
            stacklevel=2,
        )
        return build_hook(ddp, inner_hook if optimizer is None else optimizer, in_order=in_order)
    optimizer_state = OptimizerState(
        optimizer, ddp, params=params, state=state, executor=executor, **options
    )
    hook = build_hook(optimizer_state, inner_hook, in_order=in_order)
    ddp.register_comm_hook(inner_state, hook)
    return optimizer_state


def build_hook(
    optimizer_state: OptimizerState, inner_hook: Hook = allreduce_hook, *, in_order: bool = False
) -> Hook:
    """Return the hook of :func:`step_hook`, without registering it."""
    driver = BucketDriver(
        optimizer_state.process_group,
        optimizer_state.reduced,
        optimizer_state.params,
        may_leave_unused=optimizer_state.may_leave_unused,
        in_order=in_order,
    )
    driver.expect(optimizer_state.params)
    # Names and gradients of the parameters to step next.
    waiting: list[tuple[str, Tensor]] = []

    @disable_compile
    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        position, buffer = driver.position_of(bucket), bucket.buffer()
        own: list[tuple[str, Tensor, Tensor]] = []
        params = bucket.parameters()
        for param, gradient in zip(params, bucket_gradients(buffer, params), strict=True):
            name = optimizer_state.name_of(param)
            if name is not None:
                own.append((name, param, gradient))

        def step(reduced: Tensor, used: list[bool]) -> Tensor:
            if position.number == 0:
                waiting.clear()
            for (name, _, gradient), is_used in zip(own, used, strict=True):
                if is_used:  # a sparse result has no views
                    waiting.append((name, reduced if reduced.is_sparse else gradient))
            if position.last or not optimizer_state.measured:
                pairs = [*waiting]
                waiting.clear()
                _step(optimizer_state, pairs)
            if position.last:
                optimizer_state.end_iteration()
            return reduced

        names, own_params = [name for name, _, _ in own], [param for _, param, _ in own]
        start = partial(driver.communicate, inner_hook, state, bucket)
        return driver.run(bucket, position, names, own_params, start, step)

    return hook


@disable_compile
def _step(optimizer_state: OptimizerState, pairs: Sequence[tuple[str, Tensor]]) -> None:
    """Step parameters in one call, by name and gradient."""
    with named_range(RANGE):
        optimizer_state.step_some([name for name, _ in pairs], [grad for _, grad in pairs])
