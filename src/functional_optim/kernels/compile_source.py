"""The text of the module that is compiled for a chain: its graph, with write-back."""

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.expressions import (
    Namespace,
    arguments,
    function_name,
    statement,
)
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.lowering import LOWERED

_HEAD = """import operator

import torch

from functional_optim.kernels import lowering


class Step(torch.nn.Module):
    def forward(self, {inputs}, scalar_args):
"""


def compile_source(trace: Trace, root: Mapping[fx.Node, fx.Node]) -> str:
    """A module ``Step`` whose ``forward(*chunk tensors, scalar_args)`` does one step in place.

    Args:
        trace: of a pointwise chain.
        root: which node's memory each value lies in (see :func:`~.validate.validate`).

    Raises:
        UntraceableError: the graph calls a function that has no public name, or holds a constant
            tensor.
    """
    namespace = Namespace()
    lines = []
    if trace.scalar_args:
        names = "".join(f"{node.name}, " for node in trace.scalar_args)
        lines.append(f"{names}= scalar_args.unbind()")
    body = [node for node in trace.graph.nodes if node.op != "placeholder"]
    lines += [f"{node.name} = {_lowered(node, namespace)}" for node in body]
    # Old values that are kept, under another name, must not change with what they were.
    lasting = {node: None for node, _ in trace.results if root[node] in trace.chunk}
    lines += [f"kept_{node.name} = lowering.kept({node.name})" for node in lasting]
    for node, place in trace.results:
        value = f"kept_{node.name}" if node in lasting else node.name
        lines.append(f"{trace.chunk[place].name}.copy_({value})")
    lines.append("return ()")
    extra = [name for name in namespace.names if name != "torch"]
    if extra:
        raise UntraceableError(
            f"the rule calls {namespace.names[extra[0]]!r}, which a compiled program cannot name: "
            "use functions of torch, torch.special or torch.nn.functional"
        )
    inputs = ", ".join(node.name for node in trace.chunk)
    return _HEAD.format(inputs=inputs) + "".join(f"        {line}\n" for line in lines)


def _lowered(node: fx.Node, namespace: Namespace) -> str:
    name = str(node.target) if node.op == "call_method" else _name(node.target)
    if name in LOWERED:
        return f"lowering.{name}({arguments(node, namespace)})"

    def call(target: Any) -> str:
        return function_name(target) or namespace.name(target, "function")

    return statement(node, namespace, call)


def _name(target: Any) -> str:
    """The name of a function of torch; empty for Python's operators, which take 0-d tensors."""
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return ""
    return (function_name(target) or "").rpartition(".")[2]
