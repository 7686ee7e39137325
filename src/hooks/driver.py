"""Driver of all hooks that step: add a bucket, communicate it, step it, or fail.

For each bucket, DDP's thread calls :meth:`BucketDriver.position_of`,
:meth:`~BucketDriver.add_bucket`, :meth:`~BucketDriver.exchange_used`,
:meth:`~BucketDriver.communicate` and :meth:`~BucketDriver.submit`, in this order. The work queue
then runs the step. Only the step itself differs between hooks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from functional_optim.core.format import format_names
from hooks.buckets import BucketPosition, BucketPositions
from hooks.communication import AllReduceMean, Communication, HookResult
from hooks.group_lifetime import keep_group_alive
from hooks.usage import Usage, UsedFlags
from hooks.work_queue import work_queue_of
from hooks.zero_grad_check import ZeroGradCheck

Hook = Callable[[Any, dist.GradBucket], Future[Any]]
"""DDP communication hook, as ``register_comm_hook`` takes it."""


class BucketDriver:
    """State of a hook in the current iteration.

    Args:
        group: over which gradients are reduced.
        reduced: all parameters whose gradients DDP reduces.
        watched: by name, the parameters that the hook may step.
        may_leave_unused: True if DDP may reduce zeros for a parameter that the loss does not use.
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
        """Errors of the current iteration."""
        self._positions = BucketPositions(reduced)
        self._names = {id(param): name for name, param in watched.items()}
        self._usage = Usage(watched, group) if may_leave_unused else None
        self._cleared = ZeroGradCheck(watched.values(), all_of_them=may_leave_unused)
        self._iteration = Iteration(())
        self.handles = [] if self._usage is None else list(self._usage.handles)
        """Handles of hooks on parameters, to remove together with the hook."""

    def expect(self, names: Iterable[str]) -> None:
        """Expect each of these parameters once in every iteration from now on."""
        self._iteration = Iteration(names)

    def position_of(self, bucket: dist.GradBucket) -> BucketPosition:
        """Return the position of a bucket. Call it once per bucket, in order of arrival."""
        return self._positions.position_of(bucket)

    def add_bucket(self, position: BucketPosition, names: Sequence[str]) -> None:
        """Add a bucket with these parameters; with the last bucket, check that all parameters came.

        Raises:
            RuntimeError: a parameter came twice in this iteration, or not at all.
        """
        if position.number == 0:
            self._failures = []  # jobs of the previous iteration keep the old list
        self._iteration.add_bucket(position.number, names, position.backward)
        if position.last:
            self._iteration.finish()
            self._cleared.end_iteration()

    def exchange_used(self, params: Sequence[Tensor], device: torch.device) -> UsedFlags | None:
        """Start to ask which of these parameters any rank used; None if all of them were.

        Called before the bucket is communicated: collectives must start in the same order on all
        ranks, and an inner hook may start some of its collectives later, from a callback.
        """
        if self._usage is None:
            return None
        return self._usage.exchange([self._names.get(id(one), "") for one in params], device)

    def communicate(self, inner: Hook, state: Any, bucket: dist.GradBucket) -> Communication:
        """Communicate a bucket by an inner hook.

        The mean of torch's ``allreduce_hook`` is computed here instead: a thread of gloo would call
        and free the hook's callback.
        """
        if inner is allreduce_hook and (state is None or isinstance(state, dist.ProcessGroup)):
            return AllReduceMean(self.group if state is None else state, bucket.buffer())
        keep_group_alive(self, self.group)
        return HookResult(bucket.buffer(), inner(state, bucket))

    def submit(
        self,
        number: int,
        job: Callable[[], Tensor],
        device: torch.device,
        *,
        ready: bool = True,
    ) -> Future[Tensor]:
        """Queue the step of a bucket, which follows its communication.

        Args:
            number: of the bucket in its iteration.
            job: waits for the communication, steps, and returns the tensor that DDP copies into the
                gradients.
            device: of the bucket.
            ready: True if, on an accelerator, the job does not wait on the host.

        Returns:
            A future of the result or error of the job. If an earlier bucket of the iteration
            failed, the job is not run, and the error says so.
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

        return self.queue.submit(run, device, ready=ready)


def used_flags(used: UsedFlags | None, count: int) -> list[bool]:
    """Wait, and return for each of ``count`` parameters True if it is to be stepped."""
    return [True] * count if used is None else used.wait()


class Iteration:
    """Parameters that the buckets of the current iteration have brought so far, of all to step."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._seen: set[str] = set()
        self._backward = -1
        self._of_backward: set[str] = set()

    def add_bucket(self, index: int, names: Sequence[str], backward: int = -1) -> None:
        """Add the parameters of a bucket.

        ``backward`` is the number of the backward pass, if known: buckets of two modules that share
        a parameter come in the same pass.

        Raises:
            RuntimeError: a parameter that came before in this iteration; with the first bucket of
                an iteration, a parameter that never came in the last one.
        """
        if index == 0 and self._seen:
            missing = sorted(self._names - self._seen)
            self._seen = set()
            raise RuntimeError(
                "the last iteration ended before all buckets were stepped; never stepped: "
                f"{format_names(missing)}. A backward pass failed or was cut short: restart from a "
                "checkpoint, since ranks may differ now"
            )
        if backward != self._backward:
            self._backward, self._of_backward = backward, set()
        of_backward = self._of_backward if backward >= 0 else set()
        for name in names:
            if name in self._seen or name in of_backward:
                self._seen = set()
                raise RuntimeError(
                    f"the parameter {name!r} came twice in one iteration and would be stepped "
                    "twice; register one step hook per parameter, on one DDP module"
                )
            self._seen.add(name)
        self._of_backward.update(names)

    def finish(self) -> None:
        """End the iteration; raise RuntimeError if a parameter was in no bucket."""
        missing = sorted(self._names - self._seen)
        self._seen = set()
        if missing:
            raise RuntimeError(
                "these parameters were in no bucket and were never stepped: "
                f"{format_names(missing)}. They must require gradients when DDP wraps the module; "
                "leave others out of params="
            )
