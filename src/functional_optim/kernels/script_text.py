"""Generated Python as TorchScript text: functions by public names, and no number beside ``out=``.

TorchScript knows no functions of ``operator``, so they become infix operators. And where torch's
arithmetic takes a number, what it does with ``out=`` in TorchScript is to make a new tensor and to
copy it: such an operation is written in place if it may be, else with the number as a tensor.
"""

import ast
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.expressions import function_name

_INFIX: dict[Any, Any] = {
    operator.add: ast.Add,
    operator.sub: ast.Sub,
    operator.mul: ast.Mult,
    operator.truediv: ast.Div,
    operator.floordiv: ast.FloorDiv,
    operator.mod: ast.Mod,
    operator.pow: ast.Pow,
    operator.and_: ast.BitAnd,
    operator.or_: ast.BitOr,
    operator.xor: ast.BitXor,
    operator.gt: ast.Gt,
    operator.ge: ast.GtE,
    operator.lt: ast.Lt,
    operator.le: ast.LtE,
    operator.eq: ast.Eq,
    operator.ne: ast.NotEq,
    operator.neg: ast.USub,
    operator.invert: ast.Invert,
}

_ARITHMETIC = {torch.add: "add_", torch.sub: "sub_", torch.div: "div_", torch.mul: ""}
"""What has no ``out=`` of its own where its other operand is a number, and its form in place.

``mul_`` brings a number to 16 bits first where the tensor has so many, and ``mul`` does not.
"""


class Scripted(NamedTuple):
    """The statements of a function, as TorchScript takes them."""

    body: str
    """Indented by four."""
    result: str
    """What it returns; empty if nothing."""
    scalars: tuple[str, ...]
    """Numbers that are wanted as tensors, as expressions; the body knows them as ``scalar_0`` .."""


def scripted(function: Any, numbers: Sequence[str]) -> Scripted:
    """The text of a generated function (its ``text``) in TorchScript.

    Args:
        function: straight-line code.
        numbers: the names in it that are numbers.

    Raises:
        UntraceableError: it calls something that has no public name.
    """
    found: Any = ast.parse(function.text).body[0]
    writer = _Writer(function.__globals__, numbers)
    lines, result = [], ""
    for statement in found.body:
        if isinstance(statement, ast.Return):
            assert statement.value is not None
            result = ast.unparse(writer.visit(statement.value))
        else:
            lines.append(f"    {ast.unparse(writer.statement(statement))}\n")
    return Scripted("".join(lines) or "    pass\n", result, tuple(writer.scalars))


class _Writer(ast.NodeTransformer):
    """Rewrites the calls of one function."""

    def __init__(self, names: dict[str, Any], numbers: Sequence[str]) -> None:
        self.names = names
        self.numbers = set(numbers)
        self.scalars: list[str] = []
        self.memory: dict[str, str] = {}
        """The tensor that each value lies in, where that is another one."""

    def statement(self, statement: Any) -> Any:
        made = self.visit(statement)
        if isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Name):
            where = self._memory(made.value)
            if where is not None:
                self.memory[made.targets[0].id] = where
        return made

    def _memory(self, value: Any) -> str | None:
        """The name of the tensor that an expression gives back, if it gives back one it got."""
        if isinstance(value, ast.Name):
            return self.memory.get(value.id, value.id)
        if not isinstance(value, ast.Call):
            return None
        for keyword in value.keywords:
            if keyword.arg == "out":
                return self._memory(keyword.value)
        if isinstance(value.func, ast.Attribute) and value.func.attr.endswith("_"):
            return self._memory(value.func.value)
        return None

    def visit_Call(self, node: ast.Call) -> Any:
        """A call of a function by its public name, or as what is written instead."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id not in self.names:
            return node
        function = self.names[node.func.id]
        if function in _INFIX and not node.keywords:
            return _infix(_INFIX[function](), node.args)
        if function in _ARITHMETIC:
            return self._arithmetic(function, node)
        return self._named(function, node)

    def _named(self, function: Any, node: ast.Call) -> ast.Call:
        name = function_name(function)
        if name is None or name.startswith("operator."):
            raise UntraceableError(f"TorchScript has no {ast.unparse(node.func)}")
        node.func = ast.parse(name, mode="eval").body
        return node

    def _arithmetic(self, function: Any, node: ast.Call) -> ast.Call:
        """An operation of two operands, of which one may be a number."""
        keywords = {one.arg: one.value for one in node.keywords}
        plain = len(node.args) == 2 and set(keywords) == {"out"}
        if not plain or not any(map(self._is_number, node.args)):
            return self._named(function, node)
        first, second = node.args
        in_place = _ARITHMETIC[function]
        if in_place and self._memory(first) == self._memory(keywords["out"]):
            method = ast.Attribute(keywords["out"], in_place, ast.Load())
            return ast.Call(method, [second], [])
        node.args = [self._as_tensor(one) for one in node.args]
        return self._named(function, node)

    def _is_number(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            return value.id in self.numbers
        return not any(isinstance(one, ast.Name) and one.id != "float" for one in ast.walk(value))

    def _as_tensor(self, value: ast.expr) -> ast.expr:
        if not self._is_number(value):
            return value
        text = ast.unparse(value)
        if text not in self.scalars:
            self.scalars.append(text)
        return ast.Name(f"scalar_{self.scalars.index(text)}", ast.Load())


def _infix(sign: Any, operands: list[ast.expr]) -> ast.expr:
    if isinstance(sign, ast.unaryop):
        return ast.UnaryOp(sign, operands[0])
    if isinstance(sign, ast.cmpop):
        return ast.Compare(operands[0], [sign], [operands[1]])
    return ast.BinOp(operands[0], sign, operands[1])
