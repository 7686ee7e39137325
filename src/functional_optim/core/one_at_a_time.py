"""Methods that several threads may call: one call after the other, in whatever order they come."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from torch.compiler import is_compiling

from functional_optim.core.interrupts import deferring

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


class StepLock:
    """Lock that is held during a step; a copy of its owner has a lock of its own."""

    def __init__(self) -> None:
        self._held = threading.RLock()

    def __reduce__(self) -> tuple[type["StepLock"], tuple[()]]:
        return StepLock, ()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock in a ``with`` statement, which an interrupt may break off."""
        with self._held:
            yield

    def alone(self, call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """A call in no two threads at a time, with interrupts deferred once it has begun.

        No compiler traces it: its callers are :func:`~.compiling.uncompiled`.
        """
        with self._held:
            return deferring(call, *args, **kwargs)


def one_at_a_time(method: _Method) -> _Method:
    """A method during which the object's ``_lock`` is held; it may call others of its kind."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return method(self, *args, **kwargs)
        return self._lock.alone(method, self, *args, **kwargs)

    return cast("_Method", locked)
