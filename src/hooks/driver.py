"""Driver of all hooks that step: add a bucket, communicate it, step it, or fail.

For each bucket, DDP's thread calls :meth:`BucketDriver.position_of` and :meth:`BucketDriver.run`.
The work queue then runs the step. Only communication and step differ between hooks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from functional_optim.engine.messages import format_names
from hooks.buckets import BucketPosition, BucketPositions
from hooks.communication import Communication, communication_of, start_mean
from hooks.group_lifetime import keep_group_alive
from hooks.usage import Usage
from hooks.work_queue import work_queue_of
from hooks.zero_grad_check import ZeroGradCheck

Hook = Callable[[Any, dist.GradBucket], Future[Any]]
"""DDP communication hook, as ``register_comm_hook`` takes it."""
Guard = Callable[[str], AbstractContextManager[object]]
"""Function of an operation, for errors, that returns a context for calls that wait for ranks."""


class BucketDriver:
    """State of a hook in the current iteration.

    Args:
        group: over which gradients are reduced.
        reduced: all parameters whose gradients DDP reduces.
        watched: by name, the parameters that the hook may step.
        may_leave_unused: True if DDP may reduce zeros for a parameter that the loss does not use.
        in_order: True to wait for the communication of each bucket before that of the next bucket.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        reduced: Iterable[Tensor],
        watched: Mapping[str, Tensor],
        *,
        may_leave_unused: bool,
        in_order: bool = False,
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
        self._expected: list[str] = []
        """The parameters that every iteration brings once."""
        self._is_open = False
        """True from the first parameter of an iteration to the last bucket."""
        self._arrived: set[str] = set()
        """The parameters that the open iteration has brought so far."""
        self._backward = -1
        self._names_of_backward: set[str] = set()
        """The parameters that the backward pass of this number has brought so far."""
        self._in_order, self._is_last = in_order, False
        self._before: Communication | None = None
        """With ``in_order``, the communication of the previous bucket."""
        self.handles = [] if self._usage is None else list(self._usage.handles)
        """Handles of hooks on parameters, to remove together with the hook."""

    def expect(self, names: Iterable[str]) -> None:
        """Expect each of these parameters once in every iteration from now on."""
        self._expected = sorted(set(names))
        self._close()

    def position_of(self, bucket: dist.GradBucket) -> BucketPosition:
        """Return the position of a bucket. Call it once per bucket, in order of arrival."""
        return self._positions.position_of(bucket)

    def run(
        self,
        bucket: dist.GradBucket,
        position: BucketPosition,
        names: Sequence[str],
        params: Sequence[Tensor],
        start: Callable[[], Communication],
        step: Callable[[Tensor, list[bool]], Tensor],
        guard: Guard = nullcontext,
    ) -> Future[Tensor]:
        """Communicate a bucket, and queue its step.

        Args:
            bucket: as DDP passes it.
            position: of the bucket.
            names: of the parameters that the hook steps.
            params: whose use is exchanged between ranks.
            start: starts the communication.
            step: gets the reduced gradients, and for each of ``params`` True if any rank used it.
                It returns the tensor that DDP copies into the gradients.
            guard: context for calls that wait for other ranks.

        Returns:
            The future that the hook returns: see :meth:`submit`.

        Raises:
            RuntimeError: as for :meth:`add_bucket`.
        """
        self.add_bucket(position, names)
        what, device = f"the communication of bucket {position.number}", bucket.buffer().device
        with guard(what):
            wait_used = self._exchange_used(params, device)
        communication = start()

        def job() -> Tensor:
            with guard(what):
                communication.block()
                reduced, used = communication.finish(), wait_used()
            return step(reduced, used)

        return self.submit(position.number, job, device, ready=communication.ready)

    def add_bucket(self, position: BucketPosition, names: Sequence[str]) -> None:
        """Add a bucket with these parameters; with the last bucket, check that all parameters came.

        Raises:
            RuntimeError: a parameter that came before in this iteration, or in this backward pass,
                since buckets of two modules that share a parameter come in one pass; with the first
                bucket, a parameter that never came in the last iteration; with the last bucket, a
                parameter that did not come.
        """
        self._is_last = position.last
        if position.number == 0:
            self._failures = []  # jobs of the previous iteration keep the old list
            self._before = None
        if position.number == 0 and self._is_open:
            raise RuntimeError(
                "the last iteration ended before everything was stepped; never stepped: "
                f"{format_names(self._close())}. A backward pass failed or was cut short: restart "
                "from a checkpoint, since ranks may differ now"
            )
        self._is_open = self._is_open or bool(names)
        if position.backward != self._backward or position.backward < 0:
            self._backward, self._names_of_backward = position.backward, set()
        repeated = self._find_repeated(names)
        if repeated is not None:
            self._close()
            raise RuntimeError(
                f"the parameter {repeated!r} came twice in one iteration and would be stepped "
                "twice; register one step hook per parameter, on one DDP module"
            )
        self._arrived.update(names)
        self._names_of_backward.update(names)
        if position.last:
            missing = self._close()
            if missing:
                raise RuntimeError(
                    "these parameters were in no bucket and were never stepped: "
                    f"{format_names(missing)}. They must require gradients when DDP wraps the "
                    "module; leave others out of params="
                )
            self._cleared.end_iteration()

    def _find_repeated(self, names: Sequence[str]) -> str | None:
        """Return the first parameter that came before, or occurs twice; None if there is none."""
        seen = self._arrived | self._names_of_backward
        for one in names:
            if one in seen:
                return one
            seen.add(one)
        return None

    def _close(self) -> list[str]:
        """End the iteration, and return the expected parameters that did not come."""
        missing = [one for one in self._expected if one not in self._arrived]
        self._is_open, self._arrived = False, set()
        return missing

    def _exchange_used(
        self, params: Sequence[Tensor], device: torch.device
    ) -> Callable[[], list[bool]]:
        """Start to ask which of these parameters any rank used.

        Called before the bucket is communicated: collectives must start in the same order on all
        ranks, and an inner hook may start some of its collectives later, from a callback.
        """
        if self._before is not None:
            self._before.block()
        if self._usage is None or not params:
            return lambda: [True] * len(params)
        return self._usage.exchange([self._names.get(id(one), "") for one in params], device)

    def communicate(self, inner: Hook, state: Any, bucket: dist.GradBucket) -> Communication:
        """Communicate a bucket by an inner hook.

        The mean of torch's ``allreduce_hook`` is computed here instead: a thread of gloo would call
        and free the hook's callback.
        """
        if inner is allreduce_hook and (state is None or isinstance(state, dist.ProcessGroup)):
            found = start_mean(self.group if state is None else state, bucket.buffer())
        else:
            keep_group_alive(self, self.group)
            found = communication_of(bucket.buffer(), inner(state, bucket))
        if self._in_order and self._is_last:
            found.block()  # before collectives that DDP starts at the end of backward
        self._before = found if self._in_order and not self._is_last else None
        return found

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
