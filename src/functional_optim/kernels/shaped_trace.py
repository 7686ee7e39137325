"""A chain as a graph for tensors of given shapes: its rules may look at them, and iterate.

The plain tracer has one stand-in for tensors of any shape, so a rule that asks which side of a
matrix is the longer cannot be recorded by it. Here each stand-in has a tensor beside it that holds
no data (of the device "meta"): all that a tensor without data can tell is answered at once, and is
then part of the graph. Numbers that change with the step stay as unknown as they are to the other.
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
from functional_optim.kernels.trace import Tracer, traced_by
from functional_optim.kernels.validate import Validated, called, validate
from functional_optim.numeric import number

_TOLD = frozenset(
    [
        "dim",
        "dtype",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "ndimension",
        "nelement",
        "numel",
        "shape",
        "size",
        "stride",
    ]
)
"""What a tensor without data tells as any other does; more than that, nobody is told."""


def _place(device: torch.device) -> dict[str, Any]:
    """Return what tensors on a device answer when they are asked where they are."""
    of = device.type
    return {"device": device, "is_cpu": of == "cpu", "is_cuda": of == "cuda", "is_meta": False}


class Shaped(fx.Proxy):
    """A stand-in for a tensor of a known shape, dtype and layout."""

    tracer: "ShapedTracer"

    def __getattr__(self, name: str) -> Any:
        if name in self.tracer.place:
            return self.tracer.place[name]
        found = getattr(self.tracer.values[self.node], name)
        if isinstance(found, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if callable(found):
            return self._method(name)
        if name in _TOLD:
            return found
        raise UntraceableError(f"a rule asks a tensor for its {name}")

    def _method(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.tracer.create_proxy("call_method", name, (self, *args), kwargs)

        return call

    def __iter__(self) -> Iterator[Any]:
        raise UntraceableError("a rule goes through a tensor row by row")

    def __len__(self) -> int:
        return len(self.tracer.values[self.node])


class ShapedTracer(Tracer):
    """Records calls on stand-ins that know their shapes.

    Args:
        chunk: a tensor without data for each stand-in of the chunk, in order.
        numbers: a value for each other stand-in: what is made of it has shapes too, but no rule
            sees it.
        device: of the tensors that the graph is for.
    """

    has_shapes = True

    def __init__(
        self, chunk: Sequence[Tensor], numbers: Sequence[Any], device: torch.device
    ) -> None:
        super().__init__()
        self.place = _place(device)
        self._left = iter([*chunk, *numbers])
        self._chunk = len(chunk)
        self.values: dict[fx.Node, Any] = {}
        """What each node is, or is like."""
        self.shaped: set[fx.Node] = set()
        """Nodes that depend on the chunk."""
        self.numbers: set[fx.Node] = set()
        """Those among them that are numbers: a program reads them from tensors at each step."""

    def placeholder(self, name: str) -> fx.Proxy:
        node = self.graph.placeholder(name)
        self.values[node] = next(self._left)
        if len(self.shaped) < self._chunk:
            self.shaped.add(node)
        return self.proxy(node)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Shaped(node, self) if node in self.shaped else fx.Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):  # made anew at each step, perhaps of random numbers
            raise UntraceableError("a rule uses a tensor that is none of its arguments")
        return super().create_arg(a)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> Any:
        """Record a call; what is known of its result without data comes back as it is."""
        made = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        node = made.node
        value = self.values[node] = called(node, self.values)
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
        if asked not in _TOLD:
            raise UntraceableError(f"a rule asks a tensor for its {asked}")
        self.graph.erase_node(node)
        return value

    def record(self, function: Callable[..., Any], *args: Any) -> Any:
        """Record a call of a function of :mod:`functional_optim.numeric`."""
        return self.create_proxy("call_function", function, args, {})

    def _takes_numbers(self, node: fx.Node) -> bool:
        """Return True if a node depends on the leaf through numbers only."""
        return all(one in self.numbers or one not in self.shaped for one in node.all_input_nodes)

    def _item(self, several: fx.Proxy, place: int) -> Any:
        return self.create_proxy("call_function", operator.getitem, (several, place), {})


def shaped_trace(
    stages: Sequence[Stage], leaf: Leaf, shape: Signature, numbers: Numbers
) -> tuple[Trace, Validated]:
    """Trace a chain for leaves like this one.

    Args:
        stages: of the chain.
        leaf: whose tensors have the shapes, dtypes and strides.
        shape: the choices and fields of state that the graph is for.
        numbers: those of some step.

    Returns:
        The graph, and what each of its nodes is like.

    Raises:
        UntraceableError: a rule that looks at a number or at data, writes in place, or calls
            something that takes no stand-in; a result of another shape or dtype than what it is
            to replace.
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
    trace = traced_by(tracer, tuple(stages), classes, shape)
    try:
        return trace, validate(
            trace, chunk, trace.compute_scalars(numbers, totals), pointwise=False
        )
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        raise UntraceableError(f"its graph cannot be called: {error}") from error
