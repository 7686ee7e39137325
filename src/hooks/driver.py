"""The driver of all hooks that step: a bucket comes, is communicated, and is stepped, or fails.

What is stepped differs from hook to hook; what comes before and after is the same. DDP's thread
calls :meth:`BucketDriver.place_of` as a bucket comes, :meth:`~BucketDriver.enter` once it is known
what it brings, :meth:`~BucketDriver.ask` and :meth:`~BucketDriver.communicate`, in this order, and
:meth:`~BucketDriver.follow` for the step, which the work queue makes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from hooks.arrivals import Arrivals, BucketPlace
from hooks.bucket_layout import gradient_views
from hooks.cleared_gradients import ClearedGradients
from hooks.communication import Communication, HookResult, LaunchedMean
from hooks.group_lifetime import outlive
from hooks.iteration import Iteration
from hooks.usage import Usage, UsedFlags
from hooks.work_queue import work_queue_of

Hook = Callable[[Any, dist.GradBucket], Future[Any]]
"""A DDP communication hook, as ``register_comm_hook`` takes it."""


class BucketDriver:
    """State of a hook in the running iteration.

    Args:
        group: over which gradients are reduced.
        reduced: all parameters whose gradients DDP reduces.
        watched: those that may be asked for, by name.
        may_leave_unused: whether DDP may bring zeros for a parameter that had no part in the loss.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        reduced: Iterable[Tensor],
        watched: Mapping[str, Tensor],
        *,
        may_leave_unused: bool,
    ) -> None:
        self.group = group
        self.queue = work_queue_of(group)
        """The queue of all jobs of this rank."""
        self._failures: list[BaseException] = []
        """What failed in the running iteration."""
        self._arrivals = Arrivals(reduced)
        self._names = {id(param): name for name, param in watched.items()}
        self._usage = Usage(watched, group) if may_leave_unused else None
        self._cleared = ClearedGradients(watched.values(), all_of_them=may_leave_unused)
        self._iteration = Iteration(())
        self.handles = [] if self._usage is None else list(self._usage.handles)
        """Of hooks on parameters, which are to live no longer than the hook."""

    def expect(self, names: Iterable[str]) -> None:
        """These come in each iteration from now on, each once."""
        self._iteration = Iteration(names)

    def place_of(self, bucket: dist.GradBucket) -> BucketPlace:
        """Return a bucket's position in its iteration; to be called once for each, as they come."""
        return self._arrivals.place_of(bucket)

    def enter(self, place: BucketPlace, names: Sequence[str]) -> None:
        """Account for a bucket that brings these; with the last one, all must have come.

        Raises:
            RuntimeError: one that came in this iteration, one that did not in the last, or with the
                last bucket one that was in none.
        """
        if place.number == 0:
            self._failures = []  # a job of the iteration before keeps its own
        self._iteration.enter(place.number, names, place.backward)
        if place.last:
            self._iteration.finish()
            self._cleared.end_iteration()

    def ask(self, params: Sequence[Tensor], device: torch.device) -> UsedFlags | None:
        """Ask which of these any rank used; None for all of them.

        To be asked before the bucket is communicated: collectives must leave in the same order on
        all ranks, and an inner hook may launch some of its own later, from a callback.
        """
        if self._usage is None:
            return None
        return self._usage.exchange([self._names.get(id(one), "") for one in params], device)

    def communicate(self, inner: Hook, state: Any, bucket: dist.GradBucket) -> Communication:
        """Have an inner hook communicate a bucket.

        Of torch's ``allreduce_hook`` the mean is taken here: its callback would be called and let
        go of in a thread of gloo.
        """
        if inner is allreduce_hook and (state is None or isinstance(state, dist.ProcessGroup)):
            return LaunchedMean(self.group if state is None else state, bucket.buffer())
        outlive(self, self.group)
        return HookResult(bucket.buffer(), inner(state, bucket))

    def follow(
        self,
        number: int,
        job: Callable[[], Tensor],
        device: torch.device,
        *,
        ready: bool = True,
    ) -> Future[Tensor]:
        """Have the work queue do what follows the communication of a bucket.

        Args:
            number: of the bucket in its iteration.
            job: waits for the communication, steps, and returns what DDP takes for the gradients.
            device: of the bucket.
            ready: whether, on an accelerator, the job waits for nothing on the host.

        Returns:
            A future of what the job returns, or of its error. If an earlier bucket of the iteration
            failed, the job is not done, and the error says so.
        """
        failures = self._failures

        def run() -> Tensor:
            if failures:
                raise RuntimeError(
                    f"bucket {number} was not stepped, because an earlier one of this iteration "
                    f"failed: {failures[0]}"
                ) from failures[0]
            try:
                return job()
            except BaseException as error:
                failures.append(error)
                raise

        return self.queue.put(run, device, ready=ready)


def gradients_in(buffer: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each parameter of a bucket; a sparse one is a bucket of its own."""
    return [buffer] if buffer.is_sparse else gradient_views(buffer, params)


def counted(used: UsedFlags | None, count: int) -> list[bool]:
    """Return True for each of so many parameters that is to be stepped, once that is known."""
    return [True] * count if used is None else used.wait()
