"""The communication hook of post-local SGD: gradients are averaged over all ranks, later few."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

from functional_optim.core.compiling import uncompiled
from hooks.averaging.by_parameter import ByParameter
from hooks.averaging.levels import ranks_of_this_machine
from hooks.averaging.reduced_buckets import ReducedBuckets
from hooks.averaging.schedule import AveragingSchedule
from hooks.communication import LaunchedMean
from hooks.work_queue import work_queue_of

logger = logging.getLogger(__name__)

ITERATIONS, BUCKETS = "hook_iterations", "hook_buckets"
"""In a checkpoint: the hook's count; by their positions, the parameters of each bucket."""


class PostLocalSGDState:
    """Options of :func:`post_localSGD_hook`, and its count of iterations.

    The count is saved and loaded with the :class:`~hooks.PostLocalSGDOptimizer` that steps the same
    parameters, and so are the buckets that gradients were averaged in: a run that is resumed begins
    with those (:class:`~hooks.averaging.reduced_buckets.ReducedBuckets`), so that every sum is that
    of a run that never stopped, **bit for bit**, if that run had made two backward passes, after
    which DDP's buckets are final, and the optimizer has all parameters of the DDP module.

    Args:
        process_group: over which gradients are averaged at first; None for the world.
        subgroup: over which they are averaged later; None for the ranks of this machine, by its
            name (torch counts its accelerators, and has no answer where there are none).
        start_localSGD_iter: in how many iterations they are averaged over ``process_group``.
        post_local_gradient_allreduce: whether they are averaged at all later.

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
        """How many backward passes were served; it rises with the last bucket of each."""
        self.buckets: ReducedBuckets[int] = ReducedBuckets()
        """In which gradients were averaged, by the ``id`` of parameters."""
        self._has_met_all = False

    @classmethod
    def from_schedule(
        cls,
        schedule: AveragingSchedule,
        process_group: dist.ProcessGroup | None = None,
        subgroup: dist.ProcessGroup | None = None,
        *,
        post_local_gradient_allreduce: bool = True,
    ) -> "PostLocalSGDState":
        """A state whose first phase is the warm-up of a schedule.

        Args:
            schedule: that the averager has too.
            process_group: as above.
            subgroup: as above.
            post_local_gradient_allreduce: as above.
        """
        return cls(process_group, subgroup, schedule.warmup, post_local_gradient_allreduce)

    def enter(self, bucket: dist.GradBucket) -> bool:
        """Account for a bucket; whether it is averaged over all ranks."""
        if not self._has_met_all:
            self.meet(bucket.parameters())
            self._has_met_all = bucket.is_last()
        everywhere = self.iter < self.start_localSGD_iter
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD begins after %d iterations.", self.iter)
        return everywhere

    def meet(self, params: Iterable[Tensor]) -> None:
        """Be found by these parameters, and go on from what was loaded for them."""
        for param in params:
            HOOKS.add(self, [param])
            if param in _LOADED:
                iterations, buckets = _LOADED.pop(param)
                self.resume(max(self.iter, iterations), buckets)

    def resume(self, iterations: int, buckets: Sequence[Sequence[int]]) -> None:
        """Go on from a number of iterations, and from the buckets of the last of them."""
        self.iter = iterations
        self.buckets.resume(buckets)


HOOKS: ByParameter[PostLocalSGDState] = ByParameter()
"""The states of hooks that have met parameters."""
_LOADED: Any = WeakIdKeyDictionary()
"""By parameter, what was loaded before a hook met it: a number of iterations, and buckets."""


def saved_hooks(params: Sequence[Tensor]) -> dict[str, Any]:
    """Return the saved state of the hooks of these parameters; empty if there is no hook.

    A bucket that has other parameters too is left out: nothing here says which they are.
    """
    hooks = HOOKS.find(params)
    if not hooks:
        return {}
    positions = {id(param): position for position, param in enumerate(params)}
    return {
        ITERATIONS: max(state.iter for state in hooks),
        BUCKETS: [
            [positions[key] for key in keys]
            for state in hooks
            for keys in state.buckets.buckets
            if positions.keys() >= set(keys)
        ],
    }


def load_hooks(params: Sequence[Tensor], found: Mapping[str, Any]) -> None:
    """Give a checkpoint to the hook that serves these parameters, now or later."""
    if ITERATIONS not in found:
        return
    buckets = [[id(params[position]) for position in one] for one in found.get(BUCKETS, ())]
    loaded = int(found[ITERATIONS]), buckets
    hooks = HOOKS.find(params)
    for state in hooks:
        state.resume(*loaded)
    if not hooks:
        for param in params:
            _LOADED[param] = loaded


@uncompiled
def post_localSGD_hook(  # noqa: N802  torch's name
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> Future[Tensor]:
    """A DDP communication hook: the mean over all ranks at first, over a subgroup later.

    With ``t`` the iteration, from 0, and ``s`` the state's ``start_localSGD_iter``, a bucket ``g``
    becomes ``mean(g)`` over ``process_group`` while ``t < s``; from then on ``mean(g)`` over
    ``subgroup``, or is left as it is where ``post_local_gradient_allreduce`` is False. An averager
    (:class:`~hooks.PeriodicModelAverager`) then averages parameters now and then.

    Args:
        state: made by the caller, and given to ``register_comm_hook``.
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
            state.subgroup = ranks_of_this_machine()
        hook = partial(_mean, state.subgroup)
    else:
        hook = _left_alone
    return state.buckets.reduce(bucket, [id(param) for param in bucket.parameters()], hook)


def _mean(group: dist.ProcessGroup, bucket: Any) -> Future[Tensor]:
    launched = LaunchedMean(group, bucket.buffer())
    return work_queue_of(group).put(launched.wait, bucket.buffer().device)


def _left_alone(bucket: Any) -> Future[Tensor]:
    buffer = bucket.buffer()
    done: Future[Tensor] = Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
    done.set_result(buffer)
    return done
