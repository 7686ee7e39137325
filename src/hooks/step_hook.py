"""The step hook: communicate a bucket, then step its parameters, while backward goes on."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from functional_optim import State
from functional_optim.core.compiling import uncompiled
from hooks.arrivals import BucketPlace
from hooks.communication import Communication
from hooks.driver import BucketDriver, Hook, counted, gradients_in
from hooks.optimizer_state import OptimizerState
from hooks.ranges import named_range
from hooks.usage import UsedFlags

RANGE = "functional_optim.step_hook"
"""The name under which torch.profiler shows steps."""


class _Bucket(NamedTuple):
    """Record of a GradBucket until its communication is done."""

    buffer: Tensor
    params: list[Tensor]
    names: list[str]
    gradients: list[Tensor]
    number: int
    last: bool


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

    It works from the first iteration on, also with ``find_unused_parameters``, ``static_graph``
    and after DDP has rebuilt its buckets, and gives what DDP followed by the same optimizer gives:
    a parameter that no rank used is left alone. There is no ``step()`` to call; clear gradients
    (``ddp.zero_grad()``) after each backward; a warning says so once if they were not. A chain that
    needs all gradients first, such as one that clips by global norm, is stepped with the last
    bucket.

    Args:
        ddp: the module, without a communication hook so far.
        optimizer: any :class:`functional_optim.Optimizer`, or a constructor of one; or a class of
            torch.optim, or a registered one, with that class's options.
        inner_hook: any DDP communication hook (allreduce, fp16 and bf16 compression, PowerSGD).
        inner_state: the state of ``inner_hook``, as ``register_comm_hook`` would take it.
        in_order: wait for a bucket's communication before that of the next one begins. Needed by
            inner hooks that launch collectives from callbacks, as torch's PowerSGD does: over
            several buckets, on gloo, their order otherwise depends on timing and ranks get out of
            step. It costs the overlap of one bucket's communication with the next one's.
        params: the parameters to step, by name; by default all of ``ddp.module``.
        state: where to go on from; by default the state before the first step.
        executor: how the chain is run over a bucket; by default as ``optimizer`` says.
        options: of the class or constructor, by name.

    Returns:
        The :class:`~hooks.OptimizerState` that is stepped: for schedulers, hyper-parameters and
        checkpoints. ``step_hook(optimizer_state)``, which returns a hook to be registered, is
        deprecated.

    Raises:
        TypeError, ValueError: as for :class:`~hooks.OptimizerState`.
        RuntimeError: ``ddp`` has a communication hook.
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
        return hook_of(ddp, inner_hook if optimizer is None else optimizer, in_order=in_order)
    made = OptimizerState(optimizer, ddp, params=params, state=state, executor=executor, **options)
    ddp.register_comm_hook(inner_state, hook_of(made, inner_hook, in_order=in_order))
    return made


def hook_of(
    optimizer_state: OptimizerState, inner_hook: Hook = allreduce_hook, *, in_order: bool = False
) -> Hook:
    """Make the hook of :func:`step_hook`, and register it nowhere.

    Args:
        optimizer_state: the optimizer, and the parameters and state that it steps.
        inner_hook, in_order: as for :func:`step_hook`.
    """
    stepper = _Stepper(optimizer_state)
    before: list[Communication] = []

    @uncompiled
    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        if in_order and before:
            before.pop().block()
        kept, used = stepper.enter(bucket)
        communicated = stepper.driver.communicate(inner_hook, state, bucket)
        if in_order and kept.last:
            communicated.block()  # what DDP itself sends at the end must not overtake it either
        elif in_order:
            before.append(communicated)
        return stepper.follow(kept, used, communicated)

    return hook


class _Stepper:
    """The hook's memory from bucket to bucket."""

    def __init__(self, optimizer_state: OptimizerState) -> None:
        self._state = optimizer_state
        self.driver = BucketDriver(
            optimizer_state.process_group,
            optimizer_state.reduced,
            optimizer_state.params,
            may_leave_unused=optimizer_state.may_leave_unused,
        )
        self.driver.expect(optimizer_state.params)
        self._waiting: list[tuple[_Bucket, list[bool]]] = []

    def enter(self, bucket: dist.GradBucket) -> tuple[_Bucket, UsedFlags | None]:
        """Account for a bucket, and ask which of its parameters count."""
        place = self.driver.place_of(bucket)
        kept = self._keep(bucket, place)
        self.driver.enter(place, kept.names)
        return kept, self.driver.ask(kept.params, kept.buffer.device)

    def follow(
        self, kept: _Bucket, used: UsedFlags | None, communicated: Communication
    ) -> Future[Tensor]:
        """Step the bucket's parameters once it is communicated."""
        return self.driver.follow(
            kept.number,
            lambda: self._arrive(kept, used, communicated),
            kept.buffer.device,
            ready=communicated.ready,
        )

    def _arrive(self, kept: _Bucket, used: UsedFlags | None, communicated: Communication) -> Tensor:
        if kept.number == 0:
            self._waiting = []
        reduced = communicated.wait()
        self._waiting.append((_settled(kept, reduced), counted(used, len(kept.names))))
        if kept.last or not self._state.measured:
            waiting, self._waiting = self._waiting, []
            self._step(waiting)
        if kept.last:
            self._state.end_iteration()
        return reduced

    def _keep(self, bucket: dist.GradBucket, place: BucketPlace) -> _Bucket:
        buffer = bucket.buffer()
        params = bucket.parameters()
        kept = _Bucket(buffer, [], [], [], place.number, place.last)
        for param, gradient in zip(params, gradients_in(buffer, params), strict=True):
            name = self._state.name_of(param)
            if name is not None:
                kept.params.append(param)
                kept.names.append(name)
                kept.gradients.append(gradient)
        return kept

    @uncompiled
    def _step(self, buckets: Sequence[tuple[_Bucket, list[bool]]]) -> None:
        """Step the parameters of these buckets by one call."""
        names: list[str] = []
        gradients: list[Tensor] = []
        for bucket, used in buckets:
            for name, gradient, counts in zip(bucket.names, bucket.gradients, used, strict=True):
                if counts:
                    names.append(name)
                    gradients.append(gradient)
        with named_range(RANGE):
            self._state.step_some(names, gradients)


def _settled(bucket: _Bucket, reduced: Tensor) -> _Bucket:
    if reduced.is_sparse:  # it has no views
        return bucket._replace(buffer=reduced, gradients=[reduced] * len(bucket.gradients))
    return bucket
