"""The driver of the hooks that step: a bucket comes, is communicated, and is stepped, or fails.

Each of them steps something else, in another thread; what comes before and after is the same. A
bucket's moments are :meth:`BucketDriver.place_of` as it comes, :meth:`~BucketDriver.enter` once it
is known what it brings, :meth:`~BucketDriver.ask` before anything of it is communicated,
:func:`settle` when it is, and :func:`when_ready` for the step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future, collect_all

from hooks.arrivals import Arrivals, BucketPlace
from hooks.bucket_layout import gradient_views
from hooks.cleared_gradients import ClearedGradients
from hooks.group_lifetime import outlive
from hooks.iteration import Iteration
from hooks.usage import Usage

Hook = Callable[[Any, dist.GradBucket], Future[Any]]
"""A DDP communication hook, as ``register_comm_hook`` takes it."""


class BucketDriver:
    """State of a hook in the running iteration.

    Args:
        group: over which gradients are reduced; it lives a little longer than this.
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
        outlive(self, group)
        self.group = group
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
        """A bucket brings these.

        Raises:
            RuntimeError: one that came in this iteration, or one that did not in the last.
        """
        self._iteration.enter(place.number, names, place.backward)

    def finish(self, place: BucketPlace) -> None:
        """A bucket was entered: where it is the last, all must have come.

        Raises:
            RuntimeError: one that was in no bucket.
        """
        if place.last:
            self._iteration.finish()
            self._cleared.end_iteration()

    def ask(self, params: Sequence[Tensor], device: torch.device) -> Future[list[bool]] | None:
        """Return the parameters among these that any rank used; None for all of them.

        To be asked before the bucket is communicated: collectives must leave in the same order on
        all ranks, and an inner hook may launch some of its own later, from a callback.
        """
        if self._usage is None:
            return None
        return self._usage.exchange([self._names.get(id(one), "") for one in params], device)

    def communicate(self, inner: Hook, state: Any, bucket: dist.GradBucket) -> Future[Any]:
        """Have an inner hook communicate a bucket."""
        if state is None and inner is allreduce_hook:
            state = self.group  # without it, torch's hook asks the whole world
        return inner(state, bucket)


def gradients_in(buffer: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each parameter of a bucket; a sparse one is a bucket of its own."""
    return [buffer] if buffer.is_sparse else gradient_views(buffer, params)


def settle(buffer: Tensor, result: Any) -> Tensor:
    """An inner hook's result, in the bucket's own buffer, of which the gradients are views.

    Returns:
        The buffer; or the result, where that is sparse.

    Raises:
        ValueError: a result that cannot be the bucket's gradients.
    """
    tensor = result[0] if isinstance(result, (list, tuple)) else result
    if not isinstance(tensor, Tensor) or tensor.numel() != buffer.numel():
        got = f"{tensor.numel()} elements" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"the inner hook returned {got} for a bucket of {buffer.numel()} elements; it must "
            "return the bucket's gradients, reduced"
        )
    if tensor.is_sparse:
        return tensor
    if tensor.data_ptr() != buffer.data_ptr():
        with torch.no_grad():
            buffer.copy_(tensor.view_as(buffer))
    return buffer


def when_ready(
    buffer: Tensor, count: int, used: Future[list[bool]] | None, communicated: Future[Any]
) -> Future[tuple[Tensor, list[bool]]]:
    """The reduced bucket of so many parameters, and the word on which of them count."""
    settled = communicated.then(lambda done: settle(buffer, done.value()))
    if used is None:
        return settled.then(lambda done: (done.value(), [True] * count))
    return collect_all([settled, used]).then(
        # Of futures that are done: on an accelerator, waiting has this callback's stream wait.
        lambda done: (done.value()[0].wait(), done.value()[1].wait())
    )
