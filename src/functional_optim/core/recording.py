"""Calls that are recorded as one value of a graph, for functions that branch on a number."""

from typing import Any

from torch import fx


def is_recorded(x: Any) -> bool:
    """Return True if ``x`` is a proxy in a graph for tensors of known shapes."""
    return isinstance(x, fx.Proxy) and bool(getattr(x.tracer, "has_shapes", False))


def record_call(function: Any, *args: Any) -> Any:
    """Return the call of a function as a value of the graph of its arguments."""
    tracer: Any = next(one.tracer for one in args if isinstance(one, fx.Proxy))
    return tracer.record(function, *args)
