"""Lock for methods that several threads may call."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from functional_optim.core.interrupts import defer_untraced

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


class StepLock:
    """Reentrant lock of an optimizer's step. A copied or unpickled owner gets a new lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """For a ``with`` block, which an interrupt may end."""

    def __reduce__(self) -> tuple[type["StepLock"], tuple[()]]:
        return StepLock, ()

    def run(self, call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Call a function with the lock acquired and interrupts deferred.

        torch.compile must not trace this method: its callers have :func:`~.dynamo.disable_compile`.
        """
        with self.lock:
            return defer_untraced(call, *args, **kwargs)


def with_lock(method: _Method) -> _Method:
    """Decorate a method to run with the object's ``_lock`` acquired. Such methods may be nested."""

    @wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return method(self, *args, **kwargs)
        return self._lock.run(method, self, *args, **kwargs)

    return cast("_Method", wrapper)
