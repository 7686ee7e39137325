"""Communication hook of post-local SGD: averages gradients over all ranks, later over fewer."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

from functional_optim._torch.distributed import current_graph_task_id, queue_callback
from functional_optim.engine.calls import disable_compile
from hooks.averaging.bucket_history import BucketHistory
from hooks.averaging.parameter_registry import ParameterRegistry
from hooks.averaging.period_groups import machine_group
from hooks.averaging.schedule import AveragingSchedule
from hooks.communication import start_mean
from hooks.work_queue import done_future, work_queue_of

logger = logging.getLogger(__name__)

ITERATIONS, BUCKETS = "hook_iterations", "hook_buckets"
"""Keys in a checkpoint: the hook's count, and the parameters of each bucket by position."""


class PostLocalSGDState:
    """Options of :func:`post_localSGD_hook`, and its count of iterations.

    The :class:`~hooks.PostLocalSGDOptimizer` that steps the same parameters saves and loads the
    count, and the buckets in which gradients were averaged. A resumed run starts with these buckets
    (:class:`~hooks.averaging.bucket_history.BucketHistory`). Then every sum equals that of a run
    without stop, **bit for bit**, if the stopped run had made two backward passes (three with
    ``static_graph``), after which DDP's buckets are final, and if the optimizer has all parameters
    of the DDP module.

    Args:
        process_group: over which gradients are averaged first; None for the world.
        subgroup: over which gradients are averaged later; None for the ranks with this machine's
            host name (torch counts accelerators instead, which fails without accelerators).
        start_localSGD_iter: number of iterations with averages over ``process_group``.
        post_local_gradient_allreduce: False to average no gradients later.

    Raises:
        ValueError: ``start_localSGD_iter`` is negative.

    Example::

        >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100)
        >>> state.iter
        0
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803  torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if start_localSGD_iter < 0:
            raise ValueError(
                "start_localSGD_iter must be a number of iterations from 0 on, got "
                f"{start_localSGD_iter}"
            )
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        """Number of backward passes so far; increases with the last bucket of each."""
        self._backward = -1
        """The number of the backward pass whose end is watched."""
        self.buckets: BucketHistory[int] = BucketHistory()
        """The buckets in which gradients were averaged, by the ``id`` of parameters."""
        self._is_registered = False

    @classmethod
    def from_schedule(
        cls,
        schedule: AveragingSchedule,
        process_group: dist.ProcessGroup | None = None,
        subgroup: dist.ProcessGroup | None = None,
        *,
        post_local_gradient_allreduce: bool = True,
    ) -> "PostLocalSGDState":
        """Return a state whose first phase is the warm-up of a schedule.

        Args:
            schedule: that of the averager.
            process_group, subgroup, post_local_gradient_allreduce: as for the class.
        """
        return cls(process_group, subgroup, schedule.warmup, post_local_gradient_allreduce)

    def enter(self, bucket: dist.GradBucket) -> bool:
        """Count a bucket; return True if it is averaged over ``process_group``."""
        if not self._is_registered:
            self.meet(bucket.parameters())
            self._is_registered = bucket.is_last()
        everywhere = self.iter < self.start_localSGD_iter
        backward = current_graph_task_id()
        if bucket.is_last():
            self._count_pass()
        elif backward >= 0 and backward != self._backward:
            # The first pass of a static graph has no last bucket.
            queue_callback(partial(self._end_pass, self.iter))
            self._backward = backward
        return everywhere

    def _end_pass(self, iterations: int) -> None:
        """Count a backward pass at its end, unless its last bucket was counted."""
        if self.iter == iterations:
            self._count_pass()

    def _count_pass(self) -> None:
        self.iter += 1
        if self.iter == self.start_localSGD_iter:
            logger.info("Local SGD begins after %d iterations.", self.iter)

    def meet(self, params: Iterable[Tensor]) -> None:
        """Register this state for these parameters, and load the count loaded for them earlier."""
        for param in params:
            HOOK_STATES.add(self, [param])
            if param in _LOADED:
                iterations, buckets = _LOADED.pop(param)
                self.resume(max(self.iter, iterations), buckets)

    def resume(self, iterations: int, buckets: Sequence[Sequence[int]]) -> None:
        """Continue from a number of iterations, and from the buckets of the last iteration."""
        self.iter = iterations
        self.buckets.resume(buckets)


HOOK_STATES: ParameterRegistry[PostLocalSGDState] = ParameterRegistry()
"""The state of the hook of each parameter, after its first bucket."""
_LOADED: Any = WeakIdKeyDictionary()
"""By parameter, what was loaded before the hook's first bucket: iterations, and buckets."""


def save_hooks(params: Sequence[Tensor]) -> dict[str, Any]:
    """Return the state of the hooks of these parameters, or what was loaded for them; else empty.

    Buckets with other parameters are left out: these have no position here.
    """
    hooks = [(state.iter, state.buckets.buckets) for state in HOOK_STATES.find(params)]
    hooks = hooks or [_LOADED[param] for param in params if param in _LOADED][:1]
    if not hooks:
        return {}
    positions = {id(param): position for position, param in enumerate(params)}
    return {
        ITERATIONS: max(iterations for iterations, _ in hooks),
        BUCKETS: [
            [positions[key] for key in keys]
            for _, buckets in hooks
            for keys in buckets
            if positions.keys() >= set(keys)
        ],
    }


def load_hooks(params: Sequence[Tensor], found: Mapping[str, Any]) -> None:
    """Load a checkpoint into the hook of these parameters, now or at its first bucket."""
    if ITERATIONS not in found:
        return
    buckets = [[id(params[position]) for position in one] for one in found.get(BUCKETS, ())]
    loaded = int(found[ITERATIONS]), buckets
    hooks = HOOK_STATES.find(params)
    for state in hooks:
        state.resume(*loaded)
    if not hooks:
        for param in params:
            _LOADED[param] = loaded


@disable_compile
def post_localSGD_hook(  # noqa: N802  torch's name
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> Future[Tensor]:
    """Average a bucket over all ranks first, over a subgroup later: a DDP communication hook.

    With ``t`` the iteration, from 0, and ``s`` the state's ``start_localSGD_iter``, a bucket ``g``
    becomes ``mean(g)`` over ``process_group`` while ``t < s``. Later it becomes ``mean(g)`` over
    ``subgroup``, or is unchanged if ``post_local_gradient_allreduce`` is False. An averager
    (:class:`~hooks.PeriodicModelAverager`) then sometimes averages parameters.

    Args:
        state: of ``register_comm_hook``.
        bucket: of gradients.

    Returns:
        A future of the bucket's buffer.

    Example::

        >>> import torch
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> state = PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=100)
        >>> ddp.register_comm_hook(state, post_localSGD_hook)
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> state.iter
        1
        >>> dist.destroy_process_group()
    """
    hook: Callable[[Any], Future[Tensor]]
    world: Any = dist.group.WORLD
    if state.enter(bucket):
        group = world if state.process_group is None else state.process_group
        hook = partial(_mean, group)
    elif state.post_local_gradient_allreduce:
        if state.subgroup is None:
            state.subgroup = machine_group()
        hook = partial(_mean, state.subgroup)
    else:
        hook = _keep_gradients
    return state.buckets.reduce(bucket, [id(param) for param in bucket.parameters()], hook)


def _mean(group: dist.ProcessGroup, bucket: Any) -> Future[Tensor]:
    mean = start_mean(group, bucket.buffer())
    return work_queue_of(group).submit(mean.wait, bucket.buffer().device)


def _keep_gradients(bucket: Any) -> Future[Tensor]:
    return done_future(bucket.buffer())
