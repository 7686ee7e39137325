"""The graph that is compiled for a chain: its own, lowered, with write-back."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.lowering import LOWERED, is_torchs, kept


def compiled_graph(trace: Trace, root: Mapping[fx.Node, fx.Node]) -> torch.nn.Module:
    """A module that is called with ``(*tensors of a chunk, scalars)`` and does one step in place.

    Args:
        trace: of a pointwise chain.
        root: which node's memory each value lies in (see :func:`~.validate.validate`).

    Raises:
        UntraceableError: the graph holds a constant tensor.
    """
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in trace.chunk}
    scalars = graph.placeholder("scalars")
    if trace.scalar_args:
        unbound = graph.call_method("unbind", (scalars,))
        for place, node in enumerate(trace.scalar_args):
            made[node] = graph.call_function(operator.getitem, (unbound, place))
    for node in trace.graph.nodes:
        if node.op != "placeholder":
            fx.node.map_aggregate((node.args, node.kwargs), _refuse_tensor)
            made[node] = _lowered(graph.node_copy(node, made.__getitem__))
    # Old values that are kept, under another name, must not change with what they were.
    lasting = {node: made[node] for node, _ in trace.results if root[node] in trace.chunk}
    made |= {node: graph.call_function(kept, (now,)) for node, now in lasting.items()}
    targets = [graph.find_nodes(op="placeholder")[place] for _, place in trace.results]
    for target, (node, _) in zip(targets, trace.results, strict=True):
        graph.call_method("copy_", (target, made[node]))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def _refuse_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        raise UntraceableError(
            "the rule uses a tensor that is none of its arguments, which no compiled program holds"
        )
    return value


def _lowered(node: fx.Node) -> fx.Node:
    """The node, with a function that takes numbers in 0-d tensors in place of torch's."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in LOWERED and (node.op == "call_method" or is_torchs(node.target, name)):
        node.op, node.target = "call_function", LOWERED[name]
    return node
