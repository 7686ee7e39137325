"""Trace: the graph of a chain, split into a part for scalars and a part for elements.

Nodes that depend on numbers only are evaluated once per step, in Python and float64. All other
nodes are evaluated for each element.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from functional_optim.kernels.expressions import Namespace, statement


@dataclass(frozen=True)
class Trace:
    """Graph of a chain, split into a part for scalars and a part for elements."""

    compute_scalars: Any
    """``compute_scalars(numbers, totals)`` returns the scalar arguments of one step."""
    graph: fx.Graph
    """The part for elements. Placeholders: the tensors of ``chunk``, then the scalar arguments."""
    chunk: tuple[fx.Node, ...]
    """The placeholders of param, gradient and state tensors, in order."""
    scalar_args: tuple[fx.Node, ...]
    """The placeholders of the scalar arguments, in the order in which they are computed."""
    results: tuple[tuple[fx.Node, int], ...]
    """For each tensor that a step changes, the node of its new value and its index in ``chunk``."""
    totals: int
    """Number of totals that ``compute_scalars`` takes."""


def split_graph(
    graph: fx.Graph,
    chunk: tuple[fx.Node, ...],
    given: tuple[fx.Node, ...],
    totals: int,
    results: tuple[tuple[fx.Node, int], ...],
) -> Trace:
    """Split a graph into the nodes that depend on the chunk, and all others."""
    needed = set(with_sources(node for node, _ in results))
    on_chunk: set[fx.Node] = set(chunk)
    for node in graph.nodes:
        if any(source in on_chunk for source in node.all_input_nodes):
            on_chunk.add(node)
    frontier: list[fx.Node] = []
    for node in graph.nodes:
        if node in on_chunk and node not in chunk and node in needed:
            frontier += [n for n in node.all_input_nodes if n not in on_chunk and n not in frontier]
    frontier += [n for n, _ in results if n not in on_chunk and n not in frontier]
    body = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in (*chunk, *frontier):
        copied[node] = body.placeholder(node.name)
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node in on_chunk and node not in chunk and node in needed:
            copied[node] = _merge_equal(body.node_copy(node, copied.__getitem__), body, seen)
    return Trace(
        _compute_scalars(graph, given, totals, frontier),
        body,
        tuple(copied[node] for node in chunk),
        tuple(copied[node] for node in frontier),
        tuple((copied[node], place) for node, place in results),
        totals,
    )


def with_sources(ends: Iterable[fx.Node]) -> list[fx.Node]:
    """Return some nodes, and all nodes that they are computed from."""
    found = dict.fromkeys(ends)
    for node in (pending := list(found)):
        new = [source for source in node.all_input_nodes if source not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return list(found)


def _merge_equal(node: fx.Node, graph: fx.Graph, seen: dict[Any, fx.Node]) -> fx.Node:
    """Return an earlier node with the same operation and arguments, and erase this one if found."""
    # Different tensors may have the same repr.
    args = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda one: id(one) if isinstance(one, Tensor) else one
    )
    key = (node.op, node.target, repr(args))
    if key in seen:
        graph.erase_node(node)
        return seen[key]
    seen[key] = node
    return node


def _compute_scalars(
    graph: fx.Graph, given: tuple[fx.Node, ...], totals: int, frontier: Sequence[fx.Node]
) -> Any:
    """Return a Python function that evaluates the part for scalars."""
    needed = set(with_sources(frontier))
    namespace = Namespace()
    first_total = len(given) - totals
    lines = ["def compute_scalars(numbers, totals):"]
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
    return namespace.function("\n".join(lines), "compute_scalars")
