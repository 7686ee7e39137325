"""Methods that several threads may call: one call after the other, in whatever order they come."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class StepLock:
    """What is held while something is stepped; a copy of its owner has one of its own."""

    def __init__(self) -> None:
        self.held = threading.RLock()

    def __reduce__(self) -> tuple[type["StepLock"], tuple[()]]:
        return StepLock, ()


def one_at_a_time(method: _Method) -> _Method:
    """A method during which the object's ``_lock`` is held; it may call others of its kind."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock.held:
            return method(self, *args, **kwargs)

    return cast("_Method", locked)
