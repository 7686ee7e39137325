"""Tracer of a chain for tensors of given shapes, whose rules may read shapes and iterate.

A proxy of :mod:`functional_optim.kernels.trace` has no shape, so a rule cannot compare the sides of
a matrix. Here each proxy has a meta tensor, which has a shape, a dtype and strides, but no data. A
question about them is answered at once, and the answer is a constant of the graph. Numbers that
change with the step stay unknown.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import tensors_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.signature import Numbers, Signature
from functional_optim.kernels.trace import Tracer, trace_with
from functional_optim.kernels.validate import (
    MAY_RETURN_ARGUMENT,
    Validated,
    call_node,
    validate,
)
from functional_optim.numeric import number

_METADATA = frozenset(
    [
        *("dim", "dtype", "element_size", "is_complex", "is_contiguous"),
        *("is_floating_point", "itemsize", "layout", "nbytes", "ndim", "ndimension"),
        *("nelement", "numel", "shape", "size", "stride"),
    ]
)
"""Attributes and methods that rules may read: a tensor without data has the same values."""


class ShapedProxy(fx.Proxy):
    """Proxy for a tensor of a known shape, dtype and layout."""

    tracer: "ShapedTracer"

    def __getattr__(self, name: str) -> Any:
        if name in self.tracer.device_attributes:
            return self.tracer.device_attributes[name]
        found = getattr(self.tracer.values[self.node], name)
        if isinstance(found, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if callable(found):
            return lambda *args, **kwargs: self.tracer.create_proxy(
                "call_method", name, (self, *args), kwargs
            )
        if name in _METADATA:
            return found
        raise UntraceableError(f"a rule asks a tensor for its {name}")

    def __iter__(self) -> Iterator[Any]:
        raise UntraceableError("a rule goes through a tensor row by row")

    def __len__(self) -> int:
        return len(self.tracer.values[self.node])


class ShapedTracer(Tracer):
    """Tracer that records calls on proxies with shapes.

    Args:
        chunk: a meta tensor for each tensor of the chunk, in order.
        numbers: a value for each number. The values give the results of operations a shape. A rule
            cannot read them.
        device: of the tensors that the graph is for.
    """

    has_shapes = True

    def __init__(
        self, chunk: Sequence[Tensor], numbers: Sequence[Any], device: torch.device
    ) -> None:
        super().__init__()
        kind = device.type
        self.device_attributes: dict[str, Any] = {
            "device": device,
            "is_cpu": kind == "cpu",
            "is_cuda": kind == "cuda",
            "is_meta": False,
        }
        """Attributes whose values differ between the meta tensors and the tensors of a step."""
        self._left = iter([*chunk, *numbers])
        self._chunk = len(chunk)
        self.values: dict[fx.Node, Any] = {}
        """The value of each node, as a meta tensor or an example."""
        self.shaped: set[fx.Node] = set()
        """Nodes that depend on the chunk."""
        self.numbers: set[fx.Node] = set()
        """Nodes of ``shaped`` that are numbers: a program reads them from tensors at each step."""

    def placeholder(self, name: str) -> fx.Proxy:
        node = self.graph.placeholder(name)
        self.values[node] = next(self._left)
        if len(self.shaped) < self._chunk:
            self.shaped.add(node)
        return self.proxy(node)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ShapedProxy(node, self) if node in self.shaped else fx.Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):  # computed in each step, perhaps at random
            raise UntraceableError("a rule uses a tensor that is none of its arguments")
        return super().create_arg(a)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> Any:
        """Record a call. Return a proxy, or the result itself if it needs no data."""
        made = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        node = made.node
        value = self.values[node] = call_node(node, self.values)
        if self.shaped.isdisjoint(node.all_input_nodes):
            return made
        if isinstance(value, Tensor):
            self.shaped.add(node)
            return self.proxy(node)
        if isinstance(value, (tuple, list)) and any(isinstance(one, Tensor) for one in value):
            self.shaped.add(node)
            items = [self._item(made, place) for place in range(len(value))]
            return type(value)(items)
        asked = target if isinstance(target, str) else getattr(target, "__name__", "")
        if isinstance(value, float | bool) and (target is number or self._takes_numbers(node)):
            self.numbers.add(node)
            self.shaped.add(node)
            return fx.Proxy(node, self)
        if asked not in _METADATA:
            raise UntraceableError(f"a rule asks a tensor for its {asked}")
        self.graph.erase_node(node)
        return value

    def record(self, function: Callable[..., Any], *args: Any) -> Any:
        """Record a call of a function that branches on a number.

        For some numbers, the function may return one of its arguments.
        """
        made = self.create_proxy("call_function", function, args, {})
        if isinstance(made, ShapedProxy):
            made.node.meta[MAY_RETURN_ARGUMENT] = True
        return made

    def _takes_numbers(self, node: fx.Node) -> bool:
        """Return True if a node depends on the leaf through numbers only."""
        return all(one in self.numbers or one not in self.shaped for one in node.all_input_nodes)

    def _item(self, several: fx.Proxy, place: int) -> Any:
        return self.create_proxy("call_function", operator.getitem, (several, place), {})


def shaped_trace(
    stages: Sequence[Stage], leaf: Leaf, shape: Signature, numbers: Numbers
) -> tuple[Trace, Validated]:
    """Trace a chain for leaves with the shapes, dtypes and strides of a leaf.

    Return the graph, and the values of its nodes without data. ``numbers`` are example float
    coefficients of a step.
    """
    chunk = [
        torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        for one in tensors_of(leaf)
    ]
    totals = [
        torch.ones((), dtype=torch.float64, device="cpu") for _ in filter(is_measured, stages)
    ]
    tracer = ShapedTracer(chunk, [*numbers, *totals], leaf.param.device)
    classes = tuple(map(type, leaf.coefficients))
    trace = trace_with(tracer, tuple(stages), classes, shape)
    try:
        return trace, validate(trace, chunk, trace.compute_scalars(numbers, totals))
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        raise UntraceableError(f"its graph cannot be called: {error}") from error
