"""Communication of a bucket: a mean over ranks, or a user's hook.

A thread of gloo drops its reference to a tensor some time after a collective ends. If that was the
last reference, the thread needs Python's lock. It then deadlocks with a thread that holds the lock
while it frees the process group. At the end of a program, Python (before 3.14) stops the thread,
which aborts the process. So every tensor passed to gloo here is kept alive until gloo has dropped
its reference.
"""

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from functional_optim._torch.distributed import use_count

TIMEOUT = 5.0
"""Seconds for which the end of a program waits for the threads of gloo."""

_SENT: list[Tensor] = []
"""Tensors that threads of gloo may still refer to."""
_LOCK = threading.Lock()


def keep_alive(tensor: Tensor) -> None:
    """Keep a tensor that is passed to a collective alive, until nothing else refers to it."""
    with _LOCK:
        _SENT[:] = [one for one in _SENT if use_count(one) > 1]
        _SENT.append(tensor)


def _wait_for_gloo() -> None:
    until = time.monotonic() + TIMEOUT
    while any(use_count(one) > 1 for one in _SENT) and time.monotonic() < until:
        time.sleep(0.001)


atexit.register(_wait_for_gloo)


def start_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> Callable[[], None]:
    """Start to reduce a tensor over ranks, in place; return a function that waits.

    The function may be called several times. It raises RuntimeError if a rank is missing.
    """
    if tensor.device.type == "cpu":
        keep_alive(tensor)
    works = [dist.all_reduce(tensor, op, group=group, async_op=True)]

    def wait() -> None:
        for work in works:
            work.wait()
        works.clear()  # the work holds the tensor

    return wait


class Communication(NamedTuple):
    """Communication of a bucket in progress."""

    block: Callable[[], object]
    """Waits for the communication. It may be called several times."""
    finish: Callable[[], Tensor]
    """Returns the reduced gradients, after the communication."""
    ready: bool = True
    """True if, on an accelerator, waiting does not block the host."""

    def wait(self) -> Tensor:
        """Return the bucket's own buffer, reduced, or another tensor if it is sparse.

        Raises:
            ValueError: the result of a user's hook cannot be the bucket's gradients.
            RuntimeError: a rank is missing; the error of a user's hook.
        """
        self.block()
        return self.finish()


def start_mean(group: dist.ProcessGroup, buffer: Tensor) -> Communication:
    """Start the mean over ranks, in place, with the same bits as torch's ``allreduce_hook``."""
    with torch.no_grad():
        buffer.div_(group.size())
    # gloo replaces the indices of a sparse tensor: the buffer would not see those of an alias.
    block = start_all_reduce(buffer if buffer.is_sparse else buffer.detach(), group)
    return Communication(block, lambda: buffer)


def communication_of(buffer: Tensor, future: Future[Any]) -> Communication:
    """Return the communication that a user's hook has started."""

    def finish() -> Tensor:
        result = future.wait()
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        if not isinstance(tensor, Tensor) or tensor.numel() != buffer.numel():
            is_tensor = isinstance(tensor, Tensor)
            got = f"{tensor.numel()} elements" if is_tensor else type(tensor).__name__
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

    return Communication(future.wait, finish, future.done())
