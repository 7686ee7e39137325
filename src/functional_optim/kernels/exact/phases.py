"""Phases of a graph: the loop over a block in which each value is computed.

A block is worked through in one loop where every operation takes an element alone. A call of a
library, which takes a whole block, ends a loop, and so does a maximum over a block; what crosses
such an end lies in scratch.
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
"""Over a block: whatever the order, the result is the same."""

_SHAPING = frozenset(
    "contiguous flatten getitem pad reshape squeeze unsqueeze view view_as".split(" ")  # noqa: SIM905
)
"""Operations that give their first argument in another shape."""


class Variant(NamedTuple):
    """Choices of torch's build for this machine; found out by trying."""

    fused: bool
    """Whether ``a * b + c`` is rounded once, as in torch's kernels for AVX2 and AVX-512."""
    library: bool
    """Whether roots and the like are those of Intel's library."""


class Phases(NamedTuple):
    """The operations of a graph, each in its loop."""

    layout: dict[fx.Node, str]
    """Of each tensor: "element", "block" (one per block), or "number"."""
    alias: dict[fx.Node, fx.Node]
    """What only has another shape, and what it is a shape of."""
    phase: dict[fx.Node, int]
    """The loop that each value is computed in; calls and reductions stand at its end."""
    calls: tuple[fx.Node, ...]
    """What a library computes, of all elements of a block."""
    single_calls: tuple[fx.Node, ...]
    """What it computes of a number, or of what a block has one of."""
    reductions: tuple[fx.Node, ...]
    last: int
    """The number of the last loop."""
    padded: bool
    """Whether a block that is not full is filled up with zeros."""

    def source(self, node: fx.Node) -> fx.Node:
        """Return the node that a node reshapes; itself, mostly."""
        while node in self.alias:
            node = self.alias[node]
        return node


def find_phases(trace: Trace, validated: Validated, block_size: int, variant: Variant) -> Phases:
    """Arrange a graph.

    Raises:
        UntraceableError: an operation over more than a block.
    """
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
    """The tensor that a node has in another shape.

    Raises:
        UntraceableError: it has more of it, or less, or in another dtype.
    """
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
    """Return True if a node reads the bits of another as those of another dtype."""
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
