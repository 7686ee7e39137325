"""Python text of graph nodes, and functions compiled from such text."""

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class Namespace:
    """Functions and constants that a generated function uses, by name."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"torch": torch}

    def name(self, value: Any, hint: str) -> str:
        """Return the name of a value. The same object always has the same name."""
        for known, other in self.names.items():
            if other is value:
                return known
        name = f"_{hint}_{len(self.names)}"  # no node of a graph begins with an underscore
        self.names[name] = value
        return name

    def function(self, text: str, name: str) -> Callable[..., Any]:
        """Return the function of that name in the text; ``function.text`` is its source."""
        scope = dict(self.names)
        exec(compile(text, f"<{name}>", "exec"), scope)  # noqa: S102  text written by us
        made: Any = scope[name]
        made.text = text
        function: Callable[..., Any] = made
        return function


def argument(value: Any, namespace: Namespace) -> str:
    """Return an argument as text: the name of a node, a literal, or the name of a constant."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(argument(part, namespace) for part in parts)})"
    if isinstance(value, (tuple, list)):
        inner = "".join(f"{argument(item, namespace)}, " for item in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    literal = _literal(value)
    return namespace.name(value, "constant") if literal is None else literal


def _literal(value: Any) -> str | None:
    """Return a constant as a literal; None if it has no literal."""
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0.0 else f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return str(value) if isinstance(value, torch.dtype) else None


def arguments(node: fx.Node, namespace: Namespace, skip: int = 0) -> str:
    """Return all arguments of a call as text, without the first ``skip``."""
    parts = [argument(value, namespace) for value in node.args[skip:]]
    parts += [f"{key}={argument(value, namespace)}" for key, value in node.kwargs.items()]
    return ", ".join(parts)


def statement(node: fx.Node, namespace: Namespace) -> str:
    """Return a node as an expression. Functions and constants are added to the namespace."""
    if node.op == "call_method":
        own = argument(node.args[0], namespace)
        return f"{own}.{node.target}({arguments(node, namespace, 1)})"
    if node.target is builtins.getattr:
        return f"{argument(node.args[0], namespace)}.{node.args[1]}"
    if node.target is operator.getitem:
        return f"{argument(node.args[0], namespace)}[{argument(node.args[1], namespace)}]"
    target: Any = node.target
    hint = getattr(target, "__name__", "function").strip("_")
    return f"{namespace.name(target, hint)}({arguments(node, namespace)})"


COPIES = frozenset(
    [
        *("bfloat16", "bool", "byte", "char", "clone", "contiguous", "double", "float"),
        *("half", "int", "long", "short", "to", "type", "type_as"),
    ]
)
"""Methods that copy their tensor, perhaps to another dtype."""

OPERATORS: dict[Any, Any] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.neg: torch.neg,
    operator.abs: torch.abs,
    operator.and_: torch.bitwise_and,
    operator.or_: torch.bitwise_or,
    operator.xor: torch.bitwise_xor,
    operator.lshift: torch.bitwise_left_shift,
    operator.rshift: torch.bitwise_right_shift,
}
"""The torch functions of operators that programs run in place or with ``out=``."""

REFLECTED: dict[Any, Any] = {operator.add: torch.add, operator.mul: torch.mul}
"""For operators with a number on the left, the torch function of the tensor and then the number.

``torch.mul(number, tensor)`` has other bits than ``number * tensor``: for a tensor of 16-bit
floats, it rounds the number to 16 bits.
"""
