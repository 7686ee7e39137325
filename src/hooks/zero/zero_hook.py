"""ZeroHook: communicate a bucket, step the owned parameters, then gather all parameters."""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from functional_optim._torch.distributed import current_graph_task_id, is_joining
from functional_optim.engine.calls import disable_compile
from hooks.buckets import reduced_parameters
from hooks.communication import Communication
from hooks.driver import BucketDriver
from hooks.profiling import named_range
from hooks.usage import may_leave_unused
from hooks.zero.bucket import BucketCache, ZeroBucket
from hooks.zero.checks import sharded_paths
from hooks.zero.clipping import Clipping
from hooks.zero.roll_call import missing_ranks_guard
from sharding import ShardPlan, ZeroRedundancyOptimizer
from sharding.transport import Work, gather_group, make_transport
from sharding.zero.groups import sum_vector, vector_of
from sharding.zero.local_shards import Gradients
from sharding.zero.norm import addends_of

logger = logging.getLogger(__name__)

RANGE = "functional_optim.zero_step"
"""Name of the steps of a bucket in traces of torch.profiler."""


Communicate = Callable[["ZeroHook", Any, dist.GradBucket, ZeroBucket], Communication]
"""Function that starts to reduce this rank's gradients in a bucket, given the hook and its state.
"""


class ZeroHook:
    """DDP communication hook that steps a ZeroRedundancyOptimizer.

    Example::

        >>> from hooks import hook_with_zero_step
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

    def __init__(
        self,
        name: str,
        communicate: Communicate,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        clipping: Clipping,
        *,
        hold: bool,
        all_of_ddp: bool,
        in_order: bool = False,
    ) -> None:
        """Make a hook; see :func:`hook_with_zero_step` and :func:`zero_step_hook`.

        Args:
            name: of the hook, which DDP reads.
            communicate: starts the communication of a bucket.
            ddp: the module with the hook.
            zero: the optimizer.
            clipping: of the hook.
            hold: True to step all buckets after the last one is communicated, not each at once.
            all_of_ddp: True if ``zero`` must have every parameter that DDP reduces.
            in_order: as for :class:`~hooks.driver.BucketDriver`.
        """
        self.__name__ = self.__qualname__ = name
        self._communicate = communicate
        # A weak reference: the reducer of the module refers to the hook, and Python would never
        # free such a cycle.
        self._ddp = weakref.ref(ddp)
        self._zero = zero
        self._all_of_ddp = all_of_ddp
        self._device = gather_device(zero)
        self._gathers = make_transport(gather_group(ddp.process_group), self._device)
        """Over a separate group, so that gathers and reductions need no common order."""
        self._clipping = clipping
        zero.hook_unscales = clipping.has_scaler
        self._measured, self._steps_at_once = zero.measured_stages, zero.steps_at_once
        waits = clipping.is_needed or self._measured > 0 or self._steps_at_once
        self._hold = hold or waits
        reduced = reduced_parameters(ddp)
        self.driver = BucketDriver(
            ddp.process_group,
            reduced.values(),
            reduced,
            may_leave_unused=may_leave_unused(ddp),
            in_order=in_order,
        )
        self._find_paths(ddp)
        # Parameters that are frozen now have no hook that would record their use.
        self._frozen = [path for path, param in zero.params.items() if not param.requires_grad]
        self.guard = missing_ranks_guard(ddp.process_group, self._device)
        """Context for calls that wait for other ranks, which names missing ranks in errors."""
        self._entered: list[Tensor] = []
        self._waiting: list[tuple[ZeroBucket, Gradients]] = []
        """Buckets with reduced gradients, and the gradients by which this rank steps."""
        self._addends: list[Tensor] = []
        self._gathering: list[Work] = []
        """Gathers that were started. Only a failed backward leaves some of them."""
        # Hooks are removed, because the module may later be wrapped again, with other optimizers.
        handles = self.driver.handles
        weakref.finalize(self, _finish_gathers, self._gathering, handles).atexit = False

    @property
    def norm(self) -> Tensor | None:
        """The 2-norm of all gradients in the last iteration, before clipping; a float64 tensor.

        None before the first iteration, and without ``max_norm``, ``skip_nonfinite`` and
        ``grad_scaler``.
        """
        return self._clipping.norm

    @property
    def skipped(self) -> int:
        """Number of iterations that all ranks skipped because a gradient was not finite."""
        return self._clipping.skipped

    # ---------------------------------------------------------------------- called in DDP's thread

    @disable_compile
    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        """Communicate and step a bucket; the signature is that of ``register_comm_hook``."""
        position, ddp = self.driver.position_of(bucket), self._ddp()
        if position.number == 0:
            self._zero.has_hook = True
            self._wait_for_gathers()
            self._waiting, self._addends, self._entered = [], [], []
            if ddp is not None and self._buckets.plan is not self._zero.plan:
                self._find_paths(ddp)
            self._zero.check_groups()
            self._check_frozen()
        own = self._buckets.get(bucket, position)
        # Under Join, ranks may run out of data.
        without_data = ddp is not None and is_joining(ddp) and current_graph_task_id() < 0

        def start() -> Communication:
            started = self._communicate(self, state, bucket, own)
            self._mark_changed(own)
            return started

        def step(_: Tensor, used: Sequence[bool]) -> Tensor:
            return self._process(own, used, without_data)

        return self.driver.run(bucket, position, own.paths, own.params, start, step, self.guard)

    def _find_paths(self, ddp: DistributedDataParallel) -> None:
        """Find the parameters to step; ``zero`` may have more of them than before."""
        paths = sharded_paths(ddp, self._zero, all_of_ddp=self._all_of_ddp)
        self._buckets = BucketCache(self._zero.plan, paths, self._gathers.size)
        self.driver.expect(paths.values())

    def _check_frozen(self) -> None:
        for path in self._frozen:
            if self._zero.params[path].requires_grad:
                raise RuntimeError(
                    f"the parameter {path!r} required no gradient when the hook was made, and does "
                    "now; it would never be stepped: call requires_grad_(True) before DDP and the "
                    "hook are made"
                )

    def _mark_changed(self, bucket: ZeroBucket) -> None:
        """Increase the versions of parameters: a backward that still needs them raises an error.

        The values change later, in another thread, after everything that has read them so far.
        """
        # A frozen parameter does not change. Its bucket may be ready before backward has read it.
        self._entered += [param for param in bucket.params if param.requires_grad]
        if bucket.last or not self._hold:
            torch.autograd.graph.increment_version(self._entered)
            self._entered = []

    def wait(self) -> None:
        """Wait for the steps and gathers that a failed backward left.

        Call this before you load a checkpoint.
        """
        self.driver.queue.wait()
        self._wait_for_gathers()

    def _wait_for_gathers(self) -> None:
        started = [*self._gathering]
        for work in started:
            work.wait()
        del self._gathering[: len(started)]

    # ----------------------------------------------------------------- called in the queue's thread

    def _process(self, bucket: ZeroBucket, used: Sequence[bool], without_data: bool) -> Tensor:
        self._step_or_hold(bucket, used)
        if bucket.last:
            if self._hold:
                self._step_all(without_data)
            self._zero.mark_stepped()
            self._wait_for_gathers()
        return bucket.buffer

    def _step_or_hold(self, bucket: ZeroBucket, used: Sequence[bool]) -> None:
        plan = self._zero.plan
        unused = [path for path, is_used in zip(bucket.paths, used, strict=True) if not is_used]
        owned = bucket.owned_gradients(plan.shard_rank(self._gathers.rank), unused)
        if not self._hold:
            self._step(owned, (), [bucket])
            return
        self._waiting.append((bucket, owned))
        if self._clipping.is_needed:
            self._addends.append(_squared_norms(owned, plan))
        elif self._measured and not self._steps_at_once:
            self._addends.append(self._zero.measure(owned))

    def _step_all(self, without_data: bool) -> None:
        """Step all buckets, or skip the step."""
        waiting, self._waiting = self._waiting, []
        buckets = [bucket for bucket, _ in waiting]
        if self._clipping.is_needed and not self._clip(buckets, without_data=without_data):
            return
        steps = [(owned, [bucket]) for bucket, owned in waiting]
        if self._steps_at_once:
            steps = [(_merge_gradients(owned for _, owned in waiting), buckets)]
        measured: list[Tensor] = []
        for _ in range(self._measured):
            if not self._addends:
                self._addends = [self._zero.measure(one, measured=measured) for one, _ in steps]
            measured.append(self._sum_addends())
        for owned, of_step in steps:
            self._step(owned, measured, of_step)

    def _clip(self, buckets: Sequence[ZeroBucket], *, without_data: bool) -> bool:
        """Unscale and clip gradients; return False if the step is skipped."""
        squares = self._sum_addends().item()
        gradients = [gradient for one in buckets for gradient in one.gradients]
        return self._clipping.apply(gradients, squares, without_data=without_data)

    @disable_compile
    def _step(
        self, owned: Gradients, measured: Iterable[Tensor], buckets: Iterable[ZeroBucket]
    ) -> None:
        """Step by these gradients, and send these buckets' parameters to all ranks."""
        if owned or self._steps_at_once:
            with named_range(RANGE):
                self._zero.step_owned(owned, measured=tuple(measured))
        for bucket in buckets:
            if bucket.members:
                self._gathering.append(self._zero.gather_over(self._gathers, bucket.paths))

    def _sum_addends(self) -> Tensor:
        """Return the total of all ranks' addends. Collective, over the transport of the gathers.

        DDP starts collectives at any time, and these must not mix with this sum. All ranks add the
        numbers of parameters in the order of parameters, so the sum does not depend on buckets or
        timing; with whole parameters, it does not depend on owners.
        """
        addends, self._addends = self._addends, []
        shape = addends[0].shape if addends else (len(self._zero.plan.specs),)
        return sum_vector(self._zero.sum_over_ranks(addends, shape, self._gathers))


def _squared_norms(gradients: Gradients, plan: ShardPlan) -> Tensor:
    """Return the sum of squares per parameter, as ``ZeroRedundancyOptimizer.measure`` does."""
    every = ((path, one) for path, ranges in gradients.items() for _, _, one in ranges)
    return vector_of(addends_of(every, 2.0), plan)


def _merge_gradients(parts: Iterable[Gradients]) -> Gradients:
    found: dict[str, list[tuple[int, int, Tensor]]] = {}
    for one in parts:
        for path, ranges in one.items():
            found.setdefault(path, []).extend(ranges)
    return found


def _finish_gathers(gathering: list[Work], handles: list[RemovableHandle]) -> None:
    """Remove all hooks from parameters, and wait for the gathers that a failed backward left."""
    for handle in handles:
        handle.remove()
    for work in gathering:
        try:
            work.wait()
        except Exception:  # a finalizer has no caller that could handle it
            logger.exception(
                "parameters that were on their way when their hook was let go did not arrive on "
                "this rank: load a checkpoint; or call wait() before letting go of a hook"
            )


def gather_device(zero: ZeroRedundancyOptimizer) -> torch.device:
    """Return the device of all parameters that are stepped."""
    return next(param.device for param in zero.params.values() if param.requires_grad)
