"""The step hook: communicate a bucket, then step its parameters, while backward goes on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future, collect_all

from functional_optim.core.compiling import uncompiled
from hooks.arrivals import Arrivals
from hooks.bucket_layout import gradient_views
from hooks.group_lifetime import outlive
from hooks.iteration import Iteration
from hooks.optimizer_state import OptimizerState
from hooks.ranges import named_range
from hooks.usage import Usage

RANGE = "functional_optim.step_hook"
"""The name under which torch.profiler shows steps."""

Hook = Callable[[Any, dist.GradBucket], Future[Any]]
"""A DDP communication hook, as ``register_comm_hook`` takes it."""


class _Bucket(NamedTuple):
    """What is kept of a GradBucket until its communication is done."""

    buffer: Tensor
    names: list[str]
    gradients: list[Tensor]
    last: bool


def step_hook(
    optimizer_state: OptimizerState, inner_hook: Hook = allreduce_hook, *, in_order: bool = False
) -> Hook:
    """A DDP communication hook that runs ``inner_hook``, then steps the bucket's parameters.

    It works from the first iteration on, also with ``find_unused_parameters``, ``static_graph``
    and after DDP has rebuilt its buckets, and gives what DDP followed by the same optimizer gives:
    a parameter that no rank used is left alone. There is no ``step()`` to call; clear gradients
    (``ddp.zero_grad()``) after each backward. A chain that needs all gradients first, such as one
    that clips by global norm, is stepped with the last bucket.

    Args:
        optimizer_state: the optimizer, and the parameters and state that it steps.
        inner_hook: any DDP communication hook (allreduce, fp16 and bf16 compression, PowerSGD).
            The state given to ``register_comm_hook`` is its state.
        in_order: wait for a bucket's communication before that of the next one begins. Needed by
            inner hooks that launch collectives from callbacks, as torch's PowerSGD does: over
            several buckets, on gloo, their order otherwise depends on timing and ranks get out of
            step. It costs the overlap of one bucket's communication with the next one's.

    Returns:
        A hook for ``ddp.register_comm_hook(inner_state, hook)``.

    Raises:
        RuntimeError: (from backward) a parameter that was stepped twice, or never, in an iteration;
            an inner hook that returns a tensor of another size than its bucket.

    Example::

        >>> import torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from functional_optim import sgd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        >>> with torch.no_grad():
        ...     _ = ddp.module.weight.fill_(1.0)
        >>> state = OptimizerState(sgd(lr=0.5), ddp)
        >>> ddp.register_comm_hook(None, step_hook(state))
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> ddp.zero_grad()
        >>> ddp.module.weight.tolist()
        [[0.5, 0.5]]
        >>> dist.destroy_process_group()
    """
    stepper = _Stepper(optimizer_state)
    before: list[Future[Any]] = []

    @uncompiled
    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        if in_order and before:
            before.pop().wait()
        kept, used = stepper.enter(bucket)
        if state is None and inner_hook is allreduce_hook:
            state = optimizer_state.process_group  # without it, torch's hook asks the whole world
        communicated = inner_hook(state, bucket)
        if in_order and kept.last:
            communicated.wait()  # what DDP itself sends at the end must not overtake it either
        elif in_order:
            before.append(communicated)
        return stepper.step_after(kept, used, communicated)

    return hook


class _Stepper:
    """The hook's memory from bucket to bucket."""

    def __init__(self, optimizer_state: OptimizerState) -> None:
        outlive(self, optimizer_state.process_group)
        self._state = optimizer_state
        self._iteration = Iteration(optimizer_state.params)
        self._arrivals = Arrivals(optimizer_state.reduced)
        self._usage = (
            Usage(optimizer_state.params, optimizer_state.process_group)
            if optimizer_state.may_leave_unused
            else None
        )
        self._waiting: list[Future[tuple[_Bucket, list[bool]]]] = []

    def enter(self, bucket: dist.GradBucket) -> tuple[_Bucket, Future[list[bool]] | None]:
        """Account for a bucket, and ask which of its parameters count.

        It asks before the inner hook runs: collectives must leave in the same order on all ranks,
        and an inner hook may launch some of its own later, from a callback.
        """
        place = self._arrivals.place_of(bucket)
        kept = self._keep(bucket, last=place.last)
        if place.number == 0:
            self._waiting = []
        self._iteration.enter(place.number, kept.names, place.backward)
        if kept.last:
            self._iteration.finish()
        if self._usage is None:
            return kept, None
        return kept, self._usage.exchange(kept.names, kept.buffer.device)

    def step_after(
        self, kept: _Bucket, used: Future[list[bool]] | None, communicated: Future[Any]
    ) -> Future[Tensor]:
        """Step the bucket's parameters once it is communicated."""
        ready = _when_ready(kept, used, communicated)
        if not self._state.measured:
            return ready.then(lambda done: self._step([done.value()]))
        self._waiting.append(ready)
        if not kept.last:
            return ready.then(lambda done: done.value()[0].buffer)
        waiting, self._waiting = self._waiting, []
        return collect_all(waiting).then(
            lambda done: self._step([one.value() for one in done.value()])
        )

    def _keep(self, bucket: dist.GradBucket, *, last: bool) -> _Bucket:
        buffer = bucket.buffer()
        # A sparse gradient is a bucket of its own, and has no views.
        params = bucket.parameters()
        gradients = [buffer] if buffer.is_sparse else gradient_views(buffer, params)
        named = [
            (name, gradient)
            for param, gradient in zip(params, gradients, strict=True)
            if (name := self._state.name_of(param)) is not None
        ]
        return _Bucket(buffer, [name for name, _ in named], [grad for _, grad in named], last)

    @uncompiled
    def _step(self, buckets: Sequence[tuple[_Bucket, list[bool]]]) -> Tensor:
        """One call for the parameters of these buckets; returns the last one's buffer for DDP."""
        names: list[str] = []
        gradients: list[Tensor] = []
        for bucket, used in buckets:
            for name, gradient, counts in zip(bucket.names, bucket.gradients, used, strict=True):
                if counts:
                    names.append(name)
                    gradients.append(gradient)
        with named_range(RANGE):
            self._state.step(names, gradients)
        return buckets[-1][0].buffer


def _when_ready(
    bucket: _Bucket, used: Future[list[bool]] | None, communicated: Future[Any]
) -> Future[tuple[_Bucket, list[bool]]]:
    """Both the reduced gradients and the word on which of them count."""
    settled = communicated.then(lambda done: _settle(bucket, done.value()))
    if used is None:
        return settled.then(lambda done: (done.value(), [True] * len(bucket.names)))
    return collect_all([settled, used]).then(
        lambda done: (done.value()[0].value(), done.value()[1].value())
    )


def _settle(bucket: _Bucket, result: Any) -> _Bucket:
    """The inner hook's result, in the bucket's own buffer, of which the gradients are views."""
    tensor = result[0] if isinstance(result, (list, tuple)) else result
    if not isinstance(tensor, Tensor) or tensor.numel() != bucket.buffer.numel():
        got = f"{tensor.numel()} elements" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"the inner hook returned {got} for a bucket of {bucket.buffer.numel()} elements; it "
            "must return the bucket's gradients, reduced"
        )
    if tensor.is_sparse:
        return bucket._replace(buffer=tensor, gradients=[tensor] * len(bucket.gradients))
    if tensor.data_ptr() != bucket.buffer.data_ptr():
        with torch.no_grad():
            bucket.buffer.copy_(tensor.view_as(bucket.buffer))
    return bucket
