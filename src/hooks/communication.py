"""Communication of a bucket: a mean over ranks, or whatever a user's hook does.

A thread of gloo lets go of a tensor some time after a collective is over. If it is the last to hold
the tensor, it asks for Python's lock. Then it waits for a thread that frees its process group with
the lock in hand; and where the program ends, Python (before 3.14) stops it, which aborts the
process. So a tensor that is given to gloo here is held until gloo holds it no longer.
"""

import atexit
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from functional_optim._torch import holders_of

LONGEST = 5.0
"""For how many seconds a program that ends waits for the threads of gloo."""

_GIVEN: list[Tensor] = []
"""Tensors that threads of gloo may still hold."""
_LOCK = threading.Lock()


def hold(tensor: Tensor) -> None:
    """Hold a tensor that is given to a collective, until nobody else does.

    Args:
        tensor: that the caller keeps no longer than the collective takes.
    """
    with _LOCK:
        _GIVEN[:] = [one for one in _GIVEN if holders_of(one) > 1]
        _GIVEN.append(tensor)


def _await_gloo() -> None:
    until = time.monotonic() + LONGEST
    while any(holders_of(one) > 1 for one in _GIVEN) and time.monotonic() < until:
        time.sleep(0.001)


atexit.register(_await_gloo)


class LaunchedMean:
    """A mean over ranks that is under way, in place: the same bits as torch's ``allreduce_hook``.

    Args:
        group: the ranks.
        buffer: dense or sparse.
    """

    ready = True
    """On an accelerator, waiting does not keep the host."""

    def __init__(self, group: dist.ProcessGroup, buffer: Tensor) -> None:
        with torch.no_grad():
            buffer.div_(group.size())
        self._buffer = buffer
        # Of a sparse one, gloo replaces the indices: no other tensor would see the new ones.
        sent = buffer if buffer.is_sparse else buffer.detach()
        if sent.device.type == "cpu":
            hold(sent)
        self._work: dist.Work | None = dist.all_reduce(sent, group=group, async_op=True)

    def block(self) -> None:
        """Return when nothing is under way any more."""
        work = self._work
        if work is not None:
            work.wait()

    def wait(self) -> Tensor:
        """Return the buffer, once it has the mean.

        Raises:
            RuntimeError: another rank died, or did not come.
        """
        self.block()
        self._work = None  # it holds what was sent
        return self._buffer


class HookResult:
    """Result of a user's communication hook, which may still be under way.

    Args:
        buffer: of the bucket, of which the gradients are views.
        future: as the hook returned it.
    """

    def __init__(self, buffer: Tensor, future: Future[Any]) -> None:
        self._buffer, self._future = buffer, future

    @property
    def ready(self) -> bool:
        """Return True if waiting does not keep the host."""
        return self._future.done()

    def block(self) -> None:
        """Return when nothing is under way any more."""
        self._future.wait()

    def wait(self) -> Tensor:
        """Return the bucket's own buffer with the result, or the result where that is sparse.

        Raises:
            ValueError: a result that cannot be the bucket's gradients.
            RuntimeError: what the hook failed with.
        """
        buffer, result = self._buffer, self._future.wait()
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


Communication = LaunchedMean | HookResult
