"""Phases of a graph: for each value, the loop over a block that computes it.

Elementwise operations of a block share one loop. A call of a library, which takes a whole block,
ends a loop, and so does a maximum over a block. Values that a later loop reads are kept in scratch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.formulas import LIBRARY, operation
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.validate import Validated

REDUCTIONS = {"amax": "larger", "amin": "smaller"}
"""Reductions over a block. Their results do not depend on the order."""

_SHAPING = frozenset(
    "contiguous flatten getitem pad reshape squeeze unsqueeze view view_as".split(" ")  # noqa: SIM905
)
"""Operations that only change the shape of their first argument."""


class Variant(NamedTuple):
    """Choices of torch's build for this machine, which trials find."""

    fused: bool
    """True if ``a * b + c`` is rounded once, as in torch's kernels for AVX2 and AVX-512."""
    library: bool
    """True if torch calls Intel's library for roots, logarithms and similar functions."""


class Phases(NamedTuple):
    """The operations of a graph, and the loop of each."""

    layout: dict[fx.Node, str]
    """For each tensor, "element", "block" (one per block), or "number"."""
    alias: dict[fx.Node, fx.Node]
    """For each node that only changes a shape, its source."""
    phase: dict[fx.Node, int]
    """For each value, the index of its loop. Calls and reductions run at the end of the loop."""
    calls: tuple[fx.Node, ...]
    """Library calls for all elements of a block."""
    single_calls: tuple[fx.Node, ...]
    """Library calls for one number, or for one element per block."""
    reductions: tuple[fx.Node, ...]
    last: int
    """The index of the last loop."""
    padded: bool
    """True if a block that is not full is padded with zeros."""

    def source(self, node: fx.Node) -> fx.Node:
        """Return the node whose shape a node changes, or the node itself."""
        while node in self.alias:
            node = self.alias[node]
        return node


def find_phases(trace: Trace, validated: Validated, block_size: int, variant: Variant) -> Phases:
    """Assign the operations of a graph to loops."""
    values = validated.values
    count = values[trace.chunk[0]].numel()
    layout = {
        node: _layout(node, value, count, block_size)
        for node, value in values.items()
        if isinstance(value, Tensor)
    }
    for node in trace.scalar_args:
        layout[node] = "number"
    alias: dict[fx.Node, fx.Node] = {}
    padded = False
    for node in trace.graph.nodes:
        shaping = node.op != "placeholder" and operation(node) in _SHAPING
        if shaping and node in layout and not is_bitcast(node):
            alias[node] = _shaped(node, layout, values)
            padded = padded or operation(node) == "pad"
    work = [n for n in trace.graph.nodes if n.op != "placeholder" and n in layout]
    work = [n for n in work if n not in alias and layout[n] != "number"]
    every = [n for n in trace.graph.nodes if n.op != "placeholder" and n in layout]
    called = [n for n in every if n not in alias and _is_call(n, values[n].dtype, variant)]
    calls = tuple(n for n in called if layout[n] == "element")
    single = tuple(n for n in called if layout[n] != "element")
    reductions = tuple(n for n in work if operation(n) in REDUCTIONS)
    found = Phases(layout, alias, {}, calls, single, reductions, 0, padded)
    return _timed(found, trace, work)


def _layout(node: fx.Node, value: Tensor, count: int, block_size: int) -> str:
    if value.dim() == 0:
        return "number"
    if value.numel() == count:
        return "element"
    if block_size > 1 and value.numel() == count // block_size:
        return "block"
    raise UntraceableError(f"{node.name} has {value.numel()} elements, where a chunk has {count}")


def _shaped(node: fx.Node, layout: dict[fx.Node, str], values: dict[fx.Node, object]) -> fx.Node:
    """Return the tensor whose shape a node changes."""
    source, *arguments = node.args
    name = operation(node)
    plain = isinstance(source, fx.Node) and layout.get(source) == layout[node]
    if name == "getitem":
        part: Any = arguments[0]
        plain = plain and isinstance(part, slice) and (part.start, part.step) == (None, None)
    if name == "pad":
        plain = plain and not node.kwargs.get("value") and len(arguments) < 3
    if not plain:
        raise UntraceableError(f"{node.name} makes something else of a tensor than another shape")
    assert isinstance(source, fx.Node)
    return source


def is_bitcast(node: fx.Node) -> bool:
    """Return True if a node reinterprets the bits of its argument as another dtype."""
    return operation(node) == "view" and any(isinstance(a, torch.dtype) for a in node.args)


def _is_call(node: fx.Node, dtype: torch.dtype, variant: Variant) -> bool:
    return (
        variant.library and operation(node) in LIBRARY and dtype in (torch.float32, torch.float64)
    )


def _timed(found: Phases, trace: Trace, work: Sequence[fx.Node]) -> Phases:
    ends = {*found.calls, *found.reductions}
    phase: dict[fx.Node, int] = {}
    there: dict[fx.Node, int] = {}
    for node in work:
        inputs = [found.source(one) for one in node.all_input_nodes]
        phase[node] = max((there.get(one, 0) for one in inputs), default=0)
        there[node] = phase[node] + (node in ends)
    last = max(there.values(), default=0)
    results = {found.source(node) for node, _ in trace.results}
    users: dict[fx.Node, list[int]] = {}
    for node in reversed(work):
        late = node not in ends and found.layout[node] == "element"
        if late and node in users:
            phase[node] = max(phase[node], min(users[node]))
        for one in node.all_input_nodes:
            users.setdefault(found.source(one), []).append(phase[node])
    assert all(node in users or node in results for node in work)
    return found._replace(phase=phase, last=last)
