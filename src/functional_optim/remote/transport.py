"""Interface between an optimizer and the workers with its parameters."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

START_SECONDS = 600.0
"""Default time for a worker to start and to build the objects placed on it.

A worker may have to start a process and import torch. This takes minutes on a machine with many
more processes than processors. The time-out of a call is independent of this.
"""


def check_seconds(name: str, seconds: float) -> float:
    """Return a time limit. Raise ValueError unless it is finite and above 0."""
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds above 0, got {seconds!r}")
    return seconds


class Transport(Protocol):
    """Places objects on workers, and calls their methods.

    A worker is a name. A placed object is known by its handle, which only the transport reads. Each
    call returns a standard Future. The Future raises the error of the worker, or the reason why the
    worker gave no answer.

    Tensors of arguments and results may be in the sender's memory, or in shared memory. The
    receiver copies tensors before it keeps or writes them.

    Unless a transport keeps the order, calls to one worker may run in another order, or at the same
    time. The placed object must lock what needs a lock.
    """

    @property
    def has_contexts(self) -> bool:
        """Return True if workers take part in distributed autograd, so that ids name gradients."""

    @property
    def keeps_order(self) -> bool:
        """Return True if a worker makes one call at a time, in the order sent."""

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` on a worker, and keep the result on that worker.

        This starts the worker if it does not run yet. The time limit is that of a start.

        Args:
            worker: its name.
            make: a function that the worker can import.
            args: arguments that can be sent.

        Returns:
            A Future of the handle.
        """

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of a placed object.

        Args:
            handle: of the object.
            method: the name of the method.
            args: tensors, and other arguments that can be sent.

        Returns:
            A Future of the result.
        """

    def close(self) -> None:
        """Release all placed objects, if possible after the calls that were sent."""
