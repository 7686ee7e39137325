"""A chain as a graph: traced once, then run over blocks, compiled, or exported.

The stages are called with stand-ins for tensors and for the numbers that change with the step;
what they do with them is recorded. Flags and whole numbers among the coefficients are choices that
the rule may branch on: each combination of them is a graph of its own.

The graph is then cut in two: what depends on numbers only (evaluated in Python, in double
precision, once per step), and what depends on elements (evaluated for each of them).
"""

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer, TraceError

from functional_optim.executors.expressions import Namespace, statement
from functional_optim.executors.leaf import Leaf, is_measured
from functional_optim.hyper import field_types
from functional_optim.stage import Rule, Stage, Transform


class Varies(Enum):
    """A mark that is itself in every process, and is no value that a coefficient may have."""

    VARIES = "changes with the step"


VARIES = Varies.VARIES
"""Stands, among static coefficients, for a number that changes with the step."""


class Several(NamedTuple):
    """Stands, among static coefficients, for a tuple, a list or a NamedTuple."""

    kind: Any
    items: tuple[Any, ...]


class UntraceableError(TypeError):
    """A chain that cannot be written as a graph; the text says why."""


class NotPointwiseError(ValueError):
    """A chain that says it is pointwise, and looks at more than one element at a time."""


class Signature(NamedTuple):
    """What a graph depends on, apart from the stages."""

    static: tuple[Any, ...]
    """The coefficients of each stage, with :data:`VARIES` for every number."""
    fields: tuple[tuple[int | None, ...], ...]
    """For each field of each stage's state, how many tensors are in its list (None: no list)."""


@dataclass(frozen=True)
class Trace:
    """A chain as a graph, cut into what is uniform and what is done per element."""

    prologue: Any
    """``prologue(numbers, totals)`` gives the uniform values, for one step."""
    graph: fx.Graph
    """The part done per element. Placeholders: ``lane`` tensors, then uniform values."""
    lane: tuple[fx.Node, ...]
    """The placeholders of param, gradient and state tensors, in order."""
    uniform: tuple[fx.Node, ...]
    """The placeholders of the uniform values, in the order that the prologue gives them."""
    results: tuple[tuple[fx.Node, int], ...]
    """(node, place in ``lane``) of everything that a step changes."""


def signature(
    stages: Sequence[Stage], leaf: Leaf
) -> tuple[Signature, list[float], list[torch.Tensor]]:
    """What the graph of a leaf depends on, its numbers, and its tensors (param, grad, state).

    Raises:
        UntraceableError: a coefficient that is a tensor.
    """
    values: list[float] = []
    static = tuple(
        _split(stage.name, one, values)
        for stage, one in zip(stages, leaf.coefficients, strict=True)
    )
    tensors = [leaf.param, leaf.grad]
    fields = tuple(
        tuple(_take(value, tensors) for value in state) if state else () for state in leaf.states
    )
    return Signature(static, fields), values, tensors


def _take(value: Any, tensors: list[Tensor]) -> int | None:
    if isinstance(value, list):
        tensors.extend(value)
        return len(value)
    tensors.append(value)
    return None


@lru_cache(maxsize=None)
def _kinds(coefficients_class: Any) -> tuple[Any, ...]:
    return tuple(field_types(coefficients_class).values())


def _split(name: str, coefficients: Any, values: list[float]) -> tuple[Any, ...]:
    coefficients_class: Any = type(coefficients)
    kinds = _kinds(coefficients_class)
    return tuple(
        _split_one(name, value, kind, values)
        for value, kind in zip(coefficients, kinds, strict=True)
    )


def _split_one(name: str, value: Any, kind: Any, values: list[float]) -> Any:
    if type(value) is float:
        values.append(value)
        return VARIES
    if isinstance(value, (tuple, list)):
        kinds = _kinds_of_items(kind, value)
        items = (_split_one(name, v, k, values) for v, k in zip(value, kinds, strict=True))
        return Several(type(value), tuple(items))
    if isinstance(value, Tensor):
        raise UntraceableError(
            f"{name} has a hyper-parameter that is a tensor with a derivative: only the reference "
            "executor differentiates; use float(value), or executor='reference'"
        )
    if isinstance(value, float) or (kind is float and type(value) is int):
        values.append(float(value))
        return VARIES
    if type(value).__hash__ is None:
        raise UntraceableError(
            f"{name} has a coefficient of type {type(value).__name__}, which changes in place: "
            "make it a NamedTuple of numbers"
        )
    return value


def _kinds_of_items(kind: Any, value: Sequence[Any]) -> tuple[Any, ...]:
    """What a tuple, a list or a NamedTuple is said to hold, item by item."""
    if hasattr(value, "_fields"):
        return _kinds(type(value))
    said = typing.get_args(kind)
    if len(said) == 2 and said[1] is ...:
        said = said[:1]
    return said if len(said) == len(value) else (said or (kind,))[:1] * len(value)


def _joined(static: Any, proxies: Iterator[fx.Proxy]) -> Any:
    if static is VARIES:
        return next(proxies)
    if isinstance(static, Several):
        items = [_joined(one, proxies) for one in static.items]
        return static.kind(*items) if hasattr(static.kind, "_fields") else static.kind(items)
    return static


def trace(stages: tuple[Stage, ...], classes: tuple[Any, ...], shape: Signature) -> Trace:
    """Trace a chain.

    Args:
        stages: its stages, all pointwise.
        classes: the class of each stage's coefficients.
        shape: the choices and fields of state that the graph is for.

    Raises:
        UntraceableError: a rule that looks at a number or at data, writes in place, or calls
            something that takes no stand-in.
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
    tracer = _Tracer()
    params, grads = tracer.placeholder("param"), tracer.placeholder("grad")
    states = [
        _state_of(tracer, index, stage, fields)
        for index, (stage, fields) in enumerate(zip(stages, shape.fields, strict=True))
    ]
    lane = tuple(tracer.graph.nodes)
    numbers = [
        _coefficients_of(tracer, index, cls, static)
        for index, (cls, static) in enumerate(zip(classes, shape.static, strict=True))
    ]
    totals = [tracer.placeholder(f"total_{i}") for i, s in enumerate(stages) if is_measured(s)]
    given = tuple(node for node in tracer.graph.nodes if node not in lane)
    param, made = _called(stages, params, grads, states, numbers, totals)
    after = [param]
    for stage, state, fields in zip(stages, made, shape.fields, strict=True):
        _flatten_result(stage, state, fields, after)
    places = [0, *range(2, len(lane))]
    results = []
    for value, place in zip(after, places, strict=True):
        if not isinstance(value, fx.Proxy):
            raise UntraceableError(
                f"a rule made {value!r}, where a tensor computed from its arguments was expected"
            )
        if value.node is not lane[place]:
            results.append((value.node, place))
    return _cut(tracer.graph, lane, given, len(totals), tuple(results))


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


class _Tracer(GraphAppendingTracer):
    """Records calls on stand-ins, and refuses what cannot be recorded."""

    def __init__(self) -> None:
        super().__init__(fx.Graph())

    def placeholder(self, name: str) -> fx.Proxy:
        return fx.Proxy(self.graph.placeholder(name), self)

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
        if kind == "get_attr":
            raise UntraceableError(f"a rule uses {name}, a tensor that is none of its arguments")
        return super().create_node(kind, target, *rest, **named)


def _state_of(tracer: _Tracer, index: int, stage: Stage, fields: tuple[int | None, ...]) -> Any:
    if not stage.stateful:
        return ()
    values: list[Any] = []
    for name, count in zip(stage.state._fields, fields, strict=True):
        if count is None:
            values.append(tracer.placeholder(f"{name}_{index}"))
        else:
            values.append([tracer.placeholder(f"{name}_{index}_{k}") for k in range(count)])
    return stage.state(*values)


def _coefficients_of(tracer: _Tracer, index: int, cls: Any, static: tuple[Any, ...]) -> Any:
    def proxies() -> Iterator[fx.Proxy]:
        count = 0
        while True:
            yield tracer.placeholder(f"c_{index}_{count}")
            count += 1

    made = proxies()
    return cls(*(_joined(value, made) for value in static))


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
    made = []
    for stage, before, one in zip(stages, states, coefficients, strict=True):
        state = before
        try:
            if isinstance(stage, Rule):
                param, state = stage.rule(param, grad, before, one)
            elif isinstance(stage, Transform):
                sums = [next(left)] if is_measured(stage) else []
                grad, state = stage.transform(grad, param, before, one, *sums)
        except UntraceableError:
            raise
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
        into.extend(value if isinstance(value, list) else [value])


def _cut(
    graph: fx.Graph,
    lane: tuple[fx.Node, ...],
    given: tuple[fx.Node, ...],
    totals: int,
    results: tuple[tuple[fx.Node, int], ...],
) -> Trace:
    """Separate what depends on elements from what is the same for all of them."""
    needed = _needed([node for node, _ in results])
    on_lane: set[fx.Node] = set(lane)
    for node in graph.nodes:
        if any(source in on_lane for source in node.all_input_nodes):
            on_lane.add(node)
    frontier: list[fx.Node] = []
    for node in graph.nodes:
        if node in on_lane and node not in lane and node in needed:
            frontier += [n for n in node.all_input_nodes if n not in on_lane and n not in frontier]
    frontier += [n for n, _ in results if n not in on_lane and n not in frontier]
    body = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in (*lane, *frontier):
        copied[node] = body.placeholder(node.name)
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node in on_lane and node not in lane and node in needed:
            copied[node] = _merged(body.node_copy(node, copied.__getitem__), body, seen)
    return Trace(
        _prologue(graph, given, totals, frontier),
        body,
        tuple(copied[node] for node in lane),
        tuple(copied[node] for node in frontier),
        tuple((copied[node], place) for node, place in results),
    )


def _needed(ends: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _merged(node: fx.Node, graph: fx.Graph, seen: dict[Any, fx.Node]) -> fx.Node:
    """The node, or an earlier one that computes the same."""
    key = (node.op, node.target, repr(_told_apart(node.args)), repr(_told_apart(node.kwargs)))
    if key in seen:
        graph.erase_node(node)
        return seen[key]
    seen[key] = node
    return node


def _told_apart(arguments: Any) -> Any:
    """Arguments that read alike only where they are the same: two tensors may print alike."""
    return fx.node.map_aggregate(arguments, lambda one: id(one) if isinstance(one, Tensor) else one)


def _prologue(
    graph: fx.Graph, given: tuple[fx.Node, ...], totals: int, frontier: Sequence[fx.Node]
) -> Any:
    """A Python function that evaluates the uniform part."""
    needed = _needed(frontier)
    namespace = Namespace()
    first_total = len(given) - totals
    lines = ["def prologue(numbers, totals):"]
    for i, node in enumerate(given):
        if node in needed:
            source = f"numbers[{i}]" if i < first_total else f"totals[{i - first_total}]"
            lines.append(f"    {node.name} = {source}")
    lines += [
        f"    {node.name} = {statement(node, namespace)}"
        for node in graph.nodes
        if node in needed and node.op != "placeholder"
    ]
    lines.append(f"    return ({''.join(f'{node.name}, ' for node in frontier)})")
    return namespace.function("\n".join(lines), "prologue")
