"""A chain's graph, cut in two.

What depends on numbers only is evaluated in Python, in double precision, once per step; what
depends on elements is evaluated for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from functional_optim.kernels.expressions import Namespace, statement


@dataclass(frozen=True)
class Trace:
    """A chain as a graph, cut into what is scalar_args and what is done per element."""

    compute_scalars: Any
    """``compute_scalars(numbers, totals)`` gives the scalar arguments, for one step."""
    graph: fx.Graph
    """The part done per element. Placeholders: ``chunk`` tensors, then scalar arguments."""
    chunk: tuple[fx.Node, ...]
    """The placeholders of param, gradient and state tensors, in order."""
    scalar_args: tuple[fx.Node, ...]
    """The placeholders of the scalar arguments, in the order in which they are computed."""
    results: tuple[tuple[fx.Node, int], ...]
    """(node, place in ``chunk``) of everything that a step changes."""
    totals: int
    """How many sums over all gradients ``compute_scalars`` takes."""

    @property
    def operations(self) -> int:
        """Return how many passes over the elements a step makes."""
        return len([node for node in self.graph.nodes if node.op != "placeholder"])


def cut(
    graph: fx.Graph,
    chunk: tuple[fx.Node, ...],
    given: tuple[fx.Node, ...],
    totals: int,
    results: tuple[tuple[fx.Node, int], ...],
) -> Trace:
    """Separate what depends on elements from what is the same for all of them."""
    needed = _needed([node for node, _ in results])
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
            copied[node] = _merged(body.node_copy(node, copied.__getitem__), body, seen)
    return Trace(
        _compute_scalars(graph, given, totals, frontier),
        body,
        tuple(copied[node] for node in chunk),
        tuple(copied[node] for node in frontier),
        tuple((copied[node], place) for node, place in results),
        totals,
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


def _compute_scalars(
    graph: fx.Graph, given: tuple[fx.Node, ...], totals: int, frontier: Sequence[fx.Node]
) -> Any:
    """A Python function that evaluates the scalar_args part."""
    needed = _needed(frontier)
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
