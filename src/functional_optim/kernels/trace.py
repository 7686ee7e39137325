"""Tracer of a chain, whose graph is run over lists, compiled, or exported.

The stages are called with proxies for tensors and for the numbers that change with the step. The
tracer records each operation on a proxy.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer, TraceError

from functional_optim.core.leaf import is_measured
from functional_optim.core.stage import Stage
from functional_optim.core.stage_contract import call_stage, is_raw_source
from functional_optim.core.state import field_tensors
from functional_optim.kernels.errors import NotPointwiseError, UntraceableError
from functional_optim.kernels.graph import Trace, split_graph, with_sources
from functional_optim.kernels.signature import Signature, insert_numbers

_RANDOM = frozenset(
    [
        *("alpha_dropout", "bernoulli", "binomial", "dropout", "dropout1d", "dropout2d"),
        *("dropout3d", "feature_alpha_dropout", "feature_dropout", "gumbel_softmax"),
        *("multinomial", "normal", "poisson", "rand_like", "randint_like", "randn_like"),
        *("rrelu",),
    ]
)
"""Random functions, which cannot be traced: a graph merges equal calls, and blocks would draw in
another order."""


_RANK = frozenset(["dim", "ndim", "ndimension", "stride"])
"""Properties that differ between a tensor and a flat piece of it."""

_WRITES = frozenset(["__delitem__", "__setitem__", "delitem", "setitem"])
"""Functions and methods that write in place. No name of an in-place operator is here: proxies have
none, so that Python calls the operator that returns a new tensor."""

_SIZES = frozenset(["is_contiguous", "nbytes", "nelement", "numel", "shape", "size"])
"""Attributes and methods whose values depend on the number of elements or on the layout."""


class _TensorProxy(fx.Proxy):
    """Proxy for a tensor of any shape, or for a number."""

    tracer: "Tracer"

    def __getattr__(self, name: str) -> Any:
        self.tracer.check_rank(name)
        if name == "shape":
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __len__(self) -> int:
        raise NotPointwiseError(_size_error("len"))

    def __index__(self) -> int:
        self.tracer.check_size(self.node)
        raise TypeError("a number that changes with the step is no plain number while tracing")

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())


class Tracer(GraphAppendingTracer):
    """Tracer that records calls on proxies. It raises errors for calls that no graph can have."""

    has_shapes = False
    """True if proxies have shapes, so that rules may read shapes."""

    def __init__(self) -> None:
        super().__init__(fx.Graph())

    def placeholder(self, name: str) -> fx.Proxy:
        """Return the proxy of a new input of the graph."""
        return self.proxy(self.graph.placeholder(name))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TensorProxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.check_size(obj.node)
        return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.check_size(obj.node)
        return super().iter(obj)

    def check_rank(self, name: str) -> None:
        """Raise NotPointwiseError for a property that differs between a tensor and a flat piece."""
        if name in _RANK and not self.has_shapes:
            raise NotPointwiseError(_size_error(name))

    def check_size(self, node: fx.Node) -> None:
        """Raise NotPointwiseError if a branch depends on a node that depends on a size."""
        sources = [one for one in with_sources([node]) if one.op != "placeholder"]
        found = [_name_called(one.target, one.args) for one in sources]
        if not self.has_shapes and not _SIZES.isdisjoint(found):
            raise NotPointwiseError(_size_error(next(one for one in found if one in _SIZES)))

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        plain = getattr(target, "__module__", "") == "_operator"  # and_, or_, not_
        in_place = name.endswith("_") and not name.endswith("__") and not plain
        in_place = in_place or name in _WRITES
        given = rest[1] if len(rest) > 1 else named.get("kwargs") or {}
        in_place = in_place or given.get("out") is not None or given.get("inplace") is True
        if kind in ("call_method", "call_function") and in_place:
            raise UntraceableError(f"a rule calls {name}, which writes in place: rules are pure")
        if kind in ("call_method", "call_function") and name in _RANDOM:
            raise UntraceableError(f"a rule calls {name}, which draws random numbers")
        if kind in ("call_method", "call_function"):
            self.check_rank(_name_called(target, rest[0] if rest else named.get("args", ())))
        if kind == "get_attr":
            raise UntraceableError(f"a rule uses {name}, a tensor that is none of its arguments")
        return super().create_node(kind, target, *rest, **named)


def _size_error(name: str) -> str:
    return (
        f"it reads {name!r} of a tensor, and a pointwise stage is given flat pieces, of which that "
        "is another; decide by a hyper-parameter, which override(...) sets for some parameters, "
        "or give the stage kind='per_matrix'"
    )


def _name_called(target: Any, args: Any) -> str:
    """Return the name of a method, a function or an attribute."""
    if target is getattr:
        return str(args[1])
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def trace(stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature) -> Trace:
    """Trace a chain.

    Args:
        stages: its stages, all pointwise.
        classes: the class of each stage's coefficients.
        shape: the signature of the graph.

    Raises:
        UntraceableError: a rule reads a number or data, writes in place, or calls a function that
            takes no proxy.
        NotPointwiseError: a rule reads the rank or strides of a tensor, or branches on its size.
    """
    found = _cached_trace(stages, classes, shape)
    if isinstance(found, str):
        raise UntraceableError(found)
    return found


@lru_cache(maxsize=512)
def _cached_trace(
    stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature
) -> Trace | str:
    """Return the trace, or the reason why there is none."""
    try:
        return trace_with(Tracer(), stages, classes, shape)
    except UntraceableError as error:
        return str(error)


def trace_with(
    tracer: Tracer, stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature
) -> Trace:
    """Trace a chain by a tracer, whose first placeholders are the tensors of the chunk."""
    params, grads = tracer.placeholder("param"), tracer.placeholder("grad")
    states = [
        _state_proxies(tracer, index, stage, fields)
        for index, (stage, fields) in enumerate(zip(stages, shape.fields, strict=True))
    ]
    chunk = tuple(tracer.graph.nodes)
    numbers = [
        _coefficient_proxies(tracer, index, cls, static)
        for index, (cls, static) in enumerate(zip(classes, shape.static, strict=True))
    ]
    totals = [tracer.placeholder(f"total_{i}") for i, s in enumerate(stages) if is_measured(s)]
    given = tuple(node for node in tracer.graph.nodes if node not in chunk)
    param, made = _call_stages(stages, params, grads, states, numbers, totals)
    after = [param]
    for stage, state, fields in zip(stages, made, shape.fields, strict=True):
        _flatten_result(stage, state, fields, after)
    places = [0, *range(2, len(chunk))]
    results = []
    for value, place in zip(after, places, strict=True):
        if not isinstance(value, fx.Proxy):
            raise UntraceableError(
                f"a rule made {value!r}, where a tensor computed from its arguments was expected"
            )
        if value.node is not chunk[place]:
            results.append((value.node, place))
    return split_graph(tracer.graph, chunk, given, len(totals), tuple(results))


def _state_proxies(tracer: Tracer, index: int, stage: Stage, fields: tuple[int | None, ...]) -> Any:
    if not stage.stateful:
        return ()
    values: list[Any] = []
    for name, count in zip(stage.state._fields, fields, strict=True):
        if count is None:
            values.append(tracer.placeholder(f"{name}_{index}"))
        else:
            values.append([tracer.placeholder(f"{name}_{index}_{k}") for k in range(count)])
    return stage.state(*values)


def _coefficient_proxies(tracer: Tracer, index: int, cls: Any, static: tuple[Any, ...]) -> Any:
    proxies = (tracer.placeholder(f"c_{index}_{k}") for k in itertools.count())
    return cls(*(insert_numbers(value, proxies) for value in static))


def _call_stages(
    stages: Sequence[Stage],
    param: Any,
    grad: Any,
    states: Sequence[Any],
    coefficients: Sequence[Any],
    totals: list[fx.Proxy],
) -> tuple[Any, list[Any]]:
    """Call the stages on proxies, and return the new parameter and states."""
    left = iter(totals)
    made, raw = [], grad
    for stage, before, one in zip(stages, states, coefficients, strict=True):
        try:
            sums = [next(left)] if is_measured(stage) else []
            param, grad, state = call_stage(stage, param, grad, before, one, sums, raw)
            raw = grad if is_raw_source(stage) else raw
        except UntraceableError:
            raise
        except NotPointwiseError as error:
            raise NotPointwiseError(
                f"{stage.name} declares that it is pointwise, but {error}"
            ) from error
        except TraceError as error:
            raise UntraceableError(
                f"{stage.name} branches on a number or on data, which a graph cannot do (make the "
                f"choice a bool among its coefficients): {error}"
            ) from error
        except Exception as error:
            raise UntraceableError(
                f"{stage.name} cannot be traced: {type(error).__name__}: {error}"
            ) from error
        made.append(state)
    return param, made


def _flatten_result(
    stage: Stage, state: Any, fields: tuple[int | None, ...], into: list[Any]
) -> None:
    if not stage.stateful:
        return
    for name, value, count in zip(stage.state._fields, state, fields, strict=True):
        if (len(value) if isinstance(value, list) else None) != count:
            raise UntraceableError(f"{stage.name} returns another number of tensors in {name}")
        into.extend(field_tensors(value))
