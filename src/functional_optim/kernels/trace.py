"""A chain as a graph: traced once, then run over blocks, compiled, or exported.

The stages are called with stand-ins for tensors and for the numbers that change with the step;
what they do with them is recorded.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer, TraceError

from functional_optim.core.calling import called, renews_raw
from functional_optim.core.leaf import is_measured
from functional_optim.core.stage import Stage
from functional_optim.core.state import field_tensors
from functional_optim.kernels.errors import NotPointwiseError, UntraceableError
from functional_optim.kernels.graph import Trace, cut
from functional_optim.kernels.signature import Signature, joined

_RANDOM = frozenset(
    [
        "alpha_dropout",
        "bernoulli",
        "binomial",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "feature_dropout",
        "gumbel_softmax",
        "multinomial",
        "normal",
        "poisson",
        "rand_like",
        "randint_like",
        "randn_like",
        "rrelu",
    ]
)
"""In a graph, two equal calls are one, and blocks would draw in another order."""


_RANK = frozenset(["dim", "ndim", "ndimension", "stride"])
"""Properties that differ between a tensor and a flat piece of it."""

_SIZES = frozenset(["is_contiguous", "nbytes", "nelement", "numel", "shape", "size"])
"""Attributes and methods whose values depend on the number of elements or on the layout."""


class _StandIn(fx.Proxy):
    """Stands for a tensor of any shape, or for a number."""

    tracer: "Tracer"

    def __getattr__(self, name: str) -> Any:
        self.tracer.check_rank(name)
        if name == "shape":
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __len__(self) -> int:
        raise NotPointwiseError(_reads("len"))

    def __index__(self) -> int:
        self.tracer.check_size(self.node)
        raise TypeError("a number that changes with the step is no plain number while tracing")

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())


class Tracer(GraphAppendingTracer):
    """Records calls on stand-ins, and refuses what cannot be recorded."""

    has_shapes = False
    """True if stand-ins have shapes, so that rules may ask for them."""

    def __init__(self) -> None:
        super().__init__(fx.Graph())

    def placeholder(self, name: str) -> fx.Proxy:
        """A stand-in for an input of the graph."""
        return self.proxy(self.graph.placeholder(name))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _StandIn(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.check_size(obj.node)
        return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.check_size(obj.node)
        return super().iter(obj)

    def check_rank(self, name: str) -> None:
        """Refuse a question whose answer for a flat piece is another than for the tensor.

        Raises:
            NotPointwiseError: it is such a question.
        """
        if name in _RANK and not self.has_shapes:
            raise NotPointwiseError(_reads(name))

    def check_size(self, node: fx.Node) -> None:
        """Refuse a decision by the size of a tensor.

        Raises:
            NotPointwiseError: the value of the node depends on a size.
        """
        found = [_name_of(one) for one in _with_sources(node)]
        if not self.has_shapes and not _SIZES.isdisjoint(found):
            raise NotPointwiseError(_reads(next(one for one in found if one in _SIZES)))

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        plain = getattr(target, "__module__", "") == "_operator"  # and_, or_, not_
        in_place = name.endswith("_") and not name.endswith("__") and not plain
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


def _reads(name: str) -> str:
    return (
        f"it reads {name!r} of a tensor, and a pointwise stage is given flat pieces, of which that "
        "is another; decide by a hyper-parameter, which override(...) sets for some parameters, "
        "or give the stage kind='per_matrix'"
    )


def _name_of(node: fx.Node) -> str:
    return "" if node.op == "placeholder" else _name_called(node.target, node.args)


def _name_called(target: Any, args: Any) -> str:
    """The name of a method, a function or an attribute."""
    if target is getattr:
        return str(args[1])
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _with_sources(node: fx.Node) -> list[fx.Node]:
    """A node and all that it was computed from."""
    found = {node: None}
    for one in (pending := [node]):
        new = [source for source in one.all_input_nodes if source not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return list(found)


def trace(stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature) -> Trace:
    """Trace a chain.

    Args:
        stages: its stages, all pointwise.
        classes: the class of each stage's coefficients.
        shape: the choices and fields of state that the graph is for.

    Raises:
        UntraceableError: a rule that looks at a number or at data, writes in place, or calls
            something that takes no stand-in.
        NotPointwiseError: a rule that asks for the rank or strides of a tensor, or decides by its
            size.
    """
    found = _found(stages, classes, shape)
    if isinstance(found, str):
        raise UntraceableError(found)
    return found


@lru_cache(maxsize=512)
def _found(stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature) -> Trace | str:
    """The trace, or why there is none: asked for at every step."""
    try:
        return _traced(stages, classes, shape)
    except UntraceableError as error:
        return str(error)


def _traced(stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature) -> Trace:
    return traced_by(Tracer(), stages, classes, shape)


def traced_by(
    tracer: Tracer, stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature
) -> Trace:
    """Trace a chain; the tracer is asked for the stand-ins of the chunk first.

    Raises:
        UntraceableError: as of :func:`trace`.
    """
    params, grads = tracer.placeholder("param"), tracer.placeholder("grad")
    states = [
        _state_of(tracer, index, stage, fields)
        for index, (stage, fields) in enumerate(zip(stages, shape.fields, strict=True))
    ]
    chunk = tuple(tracer.graph.nodes)
    numbers = [
        _coefficients_of(tracer, index, cls, static)
        for index, (cls, static) in enumerate(zip(classes, shape.static, strict=True))
    ]
    totals = [tracer.placeholder(f"total_{i}") for i, s in enumerate(stages) if is_measured(s)]
    given = tuple(node for node in tracer.graph.nodes if node not in chunk)
    param, made = _called(stages, params, grads, states, numbers, totals)
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
    return cut(tracer.graph, chunk, given, len(totals), tuple(results))


def _state_of(tracer: Tracer, index: int, stage: Stage, fields: tuple[int | None, ...]) -> Any:
    if not stage.stateful:
        return ()
    values: list[Any] = []
    for name, count in zip(stage.state._fields, fields, strict=True):
        if count is None:
            values.append(tracer.placeholder(f"{name}_{index}"))
        else:
            values.append([tracer.placeholder(f"{name}_{index}_{k}") for k in range(count)])
    return stage.state(*values)


def _coefficients_of(tracer: Tracer, index: int, cls: Any, static: tuple[Any, ...]) -> Any:
    def proxies() -> Iterator[fx.Proxy]:
        count = 0
        while True:
            yield tracer.placeholder(f"c_{index}_{count}")
            count += 1

    made = proxies()
    return cls(*(joined(value, made) for value in static))


def _called(
    stages: Sequence[Stage],
    param: Any,
    grad: Any,
    states: Sequence[Any],
    coefficients: Sequence[Any],
    totals: list[fx.Proxy],
) -> tuple[Any, list[Any]]:
    """The stages, called on stand-ins."""
    left = iter(totals)
    made, raw = [], grad
    for stage, before, one in zip(stages, states, coefficients, strict=True):
        try:
            sums = [next(left)] if is_measured(stage) else []
            param, grad, state = called(stage, param, grad, before, one, sums, raw)
            raw = grad if renews_raw(stage) else raw
        except UntraceableError:
            raise
        except NotPointwiseError as error:
            raise NotPointwiseError(
                f"{stage.name} says that it is pointwise, but {error}"
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
