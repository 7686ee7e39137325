"""Interface between an optimizer and the workers with its parameters, whatever the transport."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

START_SECONDS = 600.0
"""For a worker to start and to make what is placed on it, unless the caller has another limit.

It starts a process and imports torch, which takes minutes where many more processes run than there
are processors; how long a call may take has nothing to do with that."""


def check_seconds(name: str, seconds: float) -> float:
    """A limit of time.

    Raises:
        ValueError: it is not finite, or not above 0.
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds above 0, got {seconds!r}")
    return seconds


class Transport(Protocol):
    """Places objects on workers and calls them there.

    A worker is a name. An object that was placed is known by its handle, which is the transport's
    own business: no one else looks into it. What comes back is a standard Future, which raises what
    was raised on the worker, or why the worker gave no answer.

    Tensors that come over, either way, may lie in the sender's memory, or in memory that is shared:
    who keeps or writes them copies them.

    Unless a transport keeps their order, calls to one worker may be made in another, or at once;
    what must not happen at once is the object's to see to.
    """

    @property
    def has_contexts(self) -> bool:
        """Return True if workers take part in distributed autograd, whose ids name gradients."""

    @property
    def keeps_order(self) -> bool:
        """Return True if a worker makes one call after the other, in the order sent."""

    def place(self, worker: str, make: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call ``make(*args)`` on a worker and keep there what it returns.

        It starts the worker where that is not there yet, and has the time that a start takes.

        Args:
            worker: its name.
            make: a function that the worker can import.
            args: what can be sent to it.

        Returns:
            A Future of the handle.
        """

    def call(self, handle: Any, method: str, *args: Any) -> "Future[Any]":
        """Call a method of an object that was placed.

        Args:
            handle: of the object.
            method: its name.
            args: tensors, and what else can be sent.

        Returns:
            A Future of what the method returns.
        """

    def close(self) -> None:
        """Let go of all that was placed; calls that were sent are made first where they can be."""
