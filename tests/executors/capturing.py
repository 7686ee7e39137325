"""Captured steps: trees, replays of a recorded step, and the same steps one by one."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import BoundOptimizer, CapturableOptimizer, Optimizer, adamw

from .graph_recorder import Graph
from .support import noise

COUNT = 640
"""Number of elements that compiled steps take as a whole."""
REFERENCE = adamw(0.1).using(executor="reference")
Between = Callable[[int, Any], Any]


def tree(dtype: torch.dtype = torch.float64, count: int = COUNT) -> dict[str, Tensor]:
    return {"a": noise(1, count, dtype=dtype), "b": noise(2, 2, count // 2, dtype=dtype)}


def gradients(dtype: torch.dtype = torch.float64, count: int = COUNT) -> Callable[[int], Any]:
    return lambda k: optree.tree_map(
        lambda one: noise(10 + k, *one.shape, dtype=dtype), tree(dtype, count)
    )


def replays(
    optimizer: Optimizer,
    params: Any,
    grads: Callable[[int], Any],
    *,
    count: int = 4,
    between: Between = lambda k, bound: None,
) -> tuple[Any, Any]:
    """Return parameters and state after a plain step, a recorded step, and its replays."""
    bound = optimizer.bind(params, capturable=True)
    assert bound.ready()
    into = optree.tree_map(torch.clone, grads(0))
    graph = Graph()
    for k in range(count):
        optree.tree_map(lambda a, b: a.copy_(b), into, grads(k))
        between(k, bound)
        if k == 0:
            bound.step(into)
        elif k == 1:
            with graph.recording():
                bound.step(into)
        else:
            graph.replay()
    return params, bound.state


def steps(
    optimizer: Optimizer,
    params: Any,
    grads: Callable[[int], Any],
    *,
    count: int = 4,
    between: Between = lambda k, bound: None,
    capturable: bool = False,
) -> tuple[Any, Any]:
    """Return the result of the same steps one by one, with Python's numbers or capturable."""
    bound = optimizer.bind(params, capturable=capturable)
    assert bound.ready()
    for k in range(count):
        between(k, bound)
        bound.step(grads(k))
    return params, bound.state


def recorded(bound: BoundOptimizer, grads: Any, *, replayed: int = 0) -> Graph:
    """Return a graph of one step, after ``replayed`` replays."""
    graph = Graph()
    with graph.recording():
        bound.step(grads)
    for _ in range(replayed):
        graph.replay()
    return graph


def captured(optimizer: Optimizer) -> CapturableOptimizer:
    bound = optimizer.bind(tree(), capturable=True)
    assert isinstance(bound, CapturableOptimizer)
    recorded(bound, gradients()(0))
    return bound


def assert_close(got: Any, want: Any, ulps: float = 8.0) -> None:
    """Require equality up to some units in the last place of the largest number."""
    paths, left, _ = optree.tree_flatten_with_path(got)
    for path, a, b in zip(paths, left, optree.tree_leaves(want), strict=True):
        if a.dtype.is_floating_point or a.is_complex():
            room = ulps * torch.finfo(a.dtype).eps
            scale = float(b.abs().max()) if b.numel() else 0.0
            assert torch.allclose(a, b, rtol=0.0, atol=room * max(scale, 1e-30)), path
        else:
            assert torch.equal(a, b), path


def require_replayed(
    optimizer: Optimizer,
    make: Callable[[], Any] = tree,
    grads: Callable[[int], Any] | None = None,
    *,
    ulps: float = 8.0,
    **more: Any,
) -> Any:
    """Require that each replay steps with its own number; return parameters and state."""
    given = gradients() if grads is None else grads
    got = replays(optimizer, make(), given, **more)
    assert_close(got, steps(optimizer.using(executor="reference"), make(), given, **more), ulps)
    return got
