"""Deferral of KeyboardInterrupt until an in-place update is complete.

Python raises KeyboardInterrupt between any two lines of its main thread: between a parameter and
its state, or between a state and its step count. Held back until the lines that belong together
are done, it finds everything stepped, or nothing.
"""

import os
import signal
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from threading import get_ident, main_thread
from typing import Any, TypeVar

from torch.compiler import is_compiling

_Result = TypeVar("_Result")

# The functions of signal look up an enum at each call, which takes as long as a small step; those
# that they call, where Python has them as CPython has, do not.
_IN_C: Any = import_module("_signal") if find_spec("_signal") else signal
_get: Callable[[int], Any] = _IN_C.getsignal
_put: Callable[[int, Any], Any] = _IN_C.signal
_INTERRUPT = int(signal.SIGINT)


_MAIN: list[int | None] = [main_thread().ident]
"""Of the main thread; in a forked process the forking thread is that."""


def _find_main_thread() -> None:
    _MAIN[0] = main_thread().ident


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_main_thread)


class _Held:
    """The handler while interrupts are held back; in the main thread only, so there is one."""

    __slots__ = ("came", "handler", "passed")

    def __init__(self) -> None:
        self.handler: Callable[[int, Any], Any] | None = None
        self.came = self.passed = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.came and self.handler is not None:
            self.passed = True
            self.handler(number, frame)
        self.came = True


_HELD = _Held()


def defer_interrupts(call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """A call, with an interrupt (Ctrl-C) that comes meanwhile held back until it is done.

    A second one breaks in, so that what hangs can be ended. Where no function handles interrupts,
    and in other threads than the main one, where Python raises none, it is the plain call.

    Raises:
        KeyboardInterrupt: or whatever the handler makes of the interrupt, after the call.
    """
    if is_compiling():
        return call(*args, **kwargs)
    return deferring(call, *args, **kwargs)


def deferring(call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """:func:`defer_interrupts`, for what torch.compile never traces."""
    if _HELD.handler is not None or get_ident() != _MAIN[0]:
        return call(*args, **kwargs)
    handler = _get(_INTERRUPT)
    if not callable(handler):
        return call(*args, **kwargs)
    _HELD.came = _HELD.passed = False
    try:
        _HELD.handler = handler
        _put(_INTERRUPT, _HELD)
        return call(*args, **kwargs)
    finally:
        _HELD.handler = None
        if _get(_INTERRUPT) is _HELD:  # the call may have put another there
            _put(_INTERRUPT, handler)
        if _HELD.came and not _HELD.passed:
            signal.raise_signal(signal.SIGINT)
