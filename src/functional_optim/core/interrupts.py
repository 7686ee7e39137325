"""Deferral of KeyboardInterrupt until an in-place update is complete.

Python may raise KeyboardInterrupt between any two lines of the main thread, for example after a
parameter is stepped and before its state is stepped. With deferral, a step is done completely or
not at all.
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

# Python's signal module looks up an enum at each call, which takes as long as a small step. The C
# functions of CPython do not.
_SIGNAL: Any = import_module("_signal") if find_spec("_signal") else signal
_get_handler: Callable[[int], Any] = _SIGNAL.getsignal
_set_handler: Callable[[int, Any], Any] = _SIGNAL.signal
_INTERRUPT = int(signal.SIGINT)


_MAIN: list[int | None] = [main_thread().ident]
"""The main thread's identifier. In a forked process, the thread that forked is the main thread."""


def _find_main_thread() -> None:
    _MAIN[0] = main_thread().ident


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_main_thread)


class _DeferringHandler:
    """Signal handler that records an interrupt, and calls the original handler for a second one."""

    __slots__ = ("came", "handler", "passed")

    def __init__(self) -> None:
        self.handler: Callable[[int, Any], Any] | None = None
        self.came = self.passed = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.came and self.handler is not None:
            self.passed = True
            self.handler(number, frame)
        self.came = True


_DEFERRING = _DeferringHandler()


def defer_interrupts(call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call a function, and defer an interrupt (Ctrl-C) until it returns.

    A second interrupt is not deferred, so that a function that hangs can be ended. Nothing is
    deferred in other threads than the main thread, or if no Python function handles interrupts.
    """
    if is_compiling():
        return call(*args, **kwargs)
    return defer_untraced(call, *args, **kwargs)


def defer_untraced(call: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call a function as :func:`defer_interrupts`, in code that torch.compile never traces."""
    if _DEFERRING.handler is not None or get_ident() != _MAIN[0]:
        return call(*args, **kwargs)
    handler = _get_handler(_INTERRUPT)
    if not callable(handler):
        return call(*args, **kwargs)
    _DEFERRING.came = _DEFERRING.passed = False
    try:
        _DEFERRING.handler = handler
        _set_handler(_INTERRUPT, _DEFERRING)
        return call(*args, **kwargs)
    finally:
        _DEFERRING.handler = None
        if _get_handler(_INTERRUPT) is _DEFERRING:  # the call may have set another handler
            _set_handler(_INTERRUPT, handler)
        if _DEFERRING.came and not _DEFERRING.passed:
            signal.raise_signal(signal.SIGINT)
