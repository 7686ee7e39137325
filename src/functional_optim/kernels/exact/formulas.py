"""C++ formulas of torch's elementwise operations, with the same roundings.

Each formula was found by comparison with torch's kernels, and each loop is compared again
(:mod:`~functional_optim.kernels.exact.self_check`). Some operations have results that depend on the
position of an element: ``sigmoid``, a power that is not a small integer, a sum of a tensor and a
multiple of a number. They have no formula, because no formula equals torch's result at every
position.

Two results are undefined, as in torch: the sign of a NaN, and which of 0.0 and -0.0 is the larger
in ``maximum``, ``minimum`` and ``clamp`` of tensors. There torch's result depends on the position.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional

from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.values import (
    INTEGERS,
    Value,
    cast,
    register_type,
    rounded,
)

_ONE = Value("1", None, 1.0)


class At(NamedTuple):
    """Dtype in which an operation computes, and dtype of its result."""

    compute: torch.dtype
    result: torch.dtype

    def __call__(self, value: Value) -> str:
        return cast(value, self.compute)


Formula = Callable[..., str]

_SHORT = (torch.bfloat16, torch.float16)


def _require_one_rounding(at: At, name: str) -> None:
    """Raise UntraceableError for 16-bit floats, which torch rounds once or twice by position."""
    if at.compute in _SHORT:
        raise UntraceableError(
            f"the rounding of {name} of {at.compute} depends on the position of an element: at the "
            "end of a tensor, and of each thread's share, torch rounds twice"
        )


def _is_one(value: Value) -> bool:
    return value.constant == 1.0


def _in_dtype(at: At, value: Value) -> str:
    """Return an operand of a sum or comparison, where torch rounds numbers to a 16-bit dtype."""
    number = value.dtype is None and at.compute in _SHORT
    return rounded(at(value), at.compute) if number else at(value)


def _add(at: At, x: Value, y: Value, *, alpha: Value = _ONE) -> str:
    if _is_one(alpha):
        return f"{_in_dtype(at, x)} + {_in_dtype(at, y)}"
    if x.dtype is None or y.dtype is None:
        raise UntraceableError(
            "the rounding of add(tensor, number, alpha=...) depends on the position of an element: "
            "multiply the number first"
        )
    _require_one_rounding(at, "add with alpha")
    return f"mad({at(y)}, {at(alpha)}, {at(x)})"


def _negative(value: Value) -> Value:
    if value.constant is not None:
        return value._replace(constant=-value.constant)
    return value._replace(text=f"(-{value.text})")


def _sub(at: At, x: Value, y: Value, *, alpha: Value = _ONE) -> str:
    if _is_one(alpha):
        return f"{_in_dtype(at, x)} - {_in_dtype(at, y)}"
    return _add(at, x, y, alpha=_negative(alpha))


def _rsub(at: At, x: Value, y: Value, *, alpha: Value = _ONE) -> str:
    return _sub(at, y, x, alpha=alpha)


def _div(at: At, x: Value, y: Value) -> str:
    if x.dtype is None and not x.is_tensor:  # torch multiplies with the reciprocal
        return f"{rounded(f'{at(_ONE)} / {at(y)}', at.compute)} * {at(x)}"
    return f"{at(x)} / {at(y)}"


def _lerp(at: At, x: Value, end: Value, weight: Value) -> str:
    if weight.dtype is not None:
        raise UntraceableError("lerp with a weight per element has no formula here")
    _require_one_rounding(at, "lerp")
    return f"lerp<{register_type(at.compute)}>({at(x)}, {at(end)}, {at(weight)})"


def _addcmul(at: At, x: Value, a: Value, b: Value, *, value: Value = _ONE) -> str:
    _require_one_rounding(at, "addcmul")
    return f"mad({at(value)} * {at(a)}, {at(b)}, {at(x)})"


def _addcdiv(at: At, x: Value, a: Value, b: Value, *, value: Value = _ONE) -> str:
    _require_one_rounding(at, "addcdiv")
    return f"{at(x)} + {at(value)} * {at(a)} / {at(b)}"


def _clamp(at: At, x: Value, min: Value | None = None, max: Value | None = None) -> str:  # noqa: A002
    text = at(x)
    kind = register_type(at.compute)
    low, high = ("larger", "smaller") if _of_tensors(min, max) else ("least", "most")
    if min is not None:
        text = f"{low}<{kind}>({text}, {at(min)})"
    return text if max is None else f"{high}<{kind}>({text}, {at(max)})"


def _clamp_max(at: At, x: Value, max: Value) -> str:  # noqa: A002  torch's name
    return _clamp(at, x, None, max)


def _of_tensors(*values: Value | None) -> bool:
    return any(value is not None and value.dtype is not None for value in values)


def _between(kind: str) -> Formula:
    def formula(at: At, x: Value, y: Value) -> str:
        return f"{kind}<{register_type(at.compute)}>({at(x)}, {at(y)})"

    return formula


def _infix(sign: str) -> Formula:
    def formula(at: At, x: Value, y: Value) -> str:
        return f"{at(x)} {sign} {at(y)}"

    return formula


def _comparison(sign: str) -> Formula:
    def formula(at: At, x: Value, y: Value) -> str:
        return f"{_in_dtype(at, x)} {sign} {_in_dtype(at, y)}"

    return formula


def _bitwise(sign: str) -> Formula:
    def formula(at: At, x: Value, y: Value) -> str:
        if at.compute not in INTEGERS and at.compute != torch.bool:
            raise UntraceableError(f"{sign} has no formula for {at.compute}")
        return f"{at(x)} {sign} {at(y)}"

    return formula


def _prefix(text: str) -> Formula:
    def formula(at: At, x: Value) -> str:
        return text.format(at(x))

    return formula


def _invert(at: At, x: Value) -> str:
    return f"!{at(x)}" if at.compute == torch.bool else f"~{at(x)}"


def _truth(sign: str) -> Formula:
    def formula(at: At, x: Value, y: Value) -> str:
        return f"{cast(x, torch.bool)} {sign} {cast(y, torch.bool)}"

    return formula


def _not(at: At, x: Value) -> str:
    return f"!{cast(x, torch.bool)}"


def _where(at: At, condition: Value, x: Value, y: Value) -> str:
    return f"{cast(condition, torch.bool)} ? {at(x)} : {at(y)}"


def _masked_fill(at: At, x: Value, mask: Value, value: Value) -> str:
    return _where(at, mask, value, x)


def _pow(at: At, x: Value, exponent: Value) -> str:
    power, text = exponent.constant, at(x)
    square = rounded("{0} * {0}", at.compute)
    products = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: f"{square} * {{0}}"}
    if x.dtype is None or at.compute in INTEGERS or power is None or abs(power) not in products:
        raise UntraceableError(
            f"the rounding of a power of {'a varying number' if power is None else power} depends "
            "on the position of an element, or the power has no formula: use products, or sqrt"
        )
    product = rounded(products[abs(power)].format(text), at.compute)
    return product if power > 0 else f"{at(_ONE)} / {product}"


def _copy(at: At, x: Value, *_: Any, **__: Any) -> str:
    return cast(x, at.result)


def _filled(number: float) -> Formula:
    def formula(at: At, _x: Value, *__: Any, **___: Any) -> str:
        return cast(Value("", None, number), at.result)

    return formula


def _full_like(at: At, _x: Value, fill_value: Value, **__: Any) -> str:
    return cast(fill_value, at.result)


def _is_sign_set(at: At, x: Value) -> str:
    return f"__builtin_signbit({at(x)})" if at.compute not in INTEGERS else f"{at(x)} < 0"


def _new_full(at: At, _x: Value, _size: Any, fill_value: Value, **__: Any) -> str:
    return cast(fill_value, at.result)


_COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_TESTS = {"isnan": "{0} != {0}", "isfinite": "{0} - {0} == 0", "isinf": "is_infinite({0})"}

FORMULAS: dict[str, Formula] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _infix("*"),
    "div": _div,
    "neg": _prefix("-{0}"),
    "abs": _prefix("size({0})"),
    "sign": _prefix("sign({0})"),
    "square": _prefix("{0} * {0}"),
    "reciprocal": _prefix("1 / {0}"),
    "pow": _pow,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "maximum": _between("larger"),
    "minimum": _between("smaller"),
    "where": _where,
    "masked_fill": _masked_fill,
    "bitwise_and": _bitwise("&"),
    "bitwise_or": _bitwise("|"),
    "bitwise_xor": _bitwise("^"),
    "bitwise_not": _invert,
    "bitwise_left_shift": _bitwise("<<"),
    "bitwise_right_shift": _bitwise(">>"),
    "logical_and": _truth("&&"),
    "logical_or": _truth("||"),
    "logical_xor": _truth("!="),
    "logical_not": _not,
    "signbit": _is_sign_set,
    "to": _copy,
    "zeros_like": _filled(0.0),
    "ones_like": _filled(1.0),
    "full_like": _full_like,
    "fill": _full_like,
    "new_full": _new_full,
    "sqrt": _prefix("root({0})"),
    **{name: _comparison(sign) for name, sign in _COMPARISONS.items()},
    **{name: _prefix(text) for name, text in _TESTS.items()},
}
"""Formulas by the name of the operation."""

COMPARING = frozenset({*_COMPARISONS, *_TESTS, "signbit"})
"""Operations that compute in the dtype of their operands, not of their result."""

_ALIASES = {
    **dict.fromkeys(["multiply"], "mul"),
    **dict.fromkeys(["truediv", "divide", "true_divide"], "div"),
    **dict.fromkeys(["subtract"], "sub"),
    **dict.fromkeys(["negative"], "neg"),
    **dict.fromkeys(["absolute"], "abs"),
    **dict.fromkeys(["sgn"], "sign"),
    **dict.fromkeys(["clip"], "clamp"),
    **dict.fromkeys(["and_"], "bitwise_and"),
    **dict.fromkeys(["or_"], "bitwise_or"),
    **dict.fromkeys(["xor"], "bitwise_xor"),
    **dict.fromkeys(["invert"], "bitwise_not"),
    **dict.fromkeys(["lshift"], "bitwise_left_shift"),
    **dict.fromkeys(["rshift"], "bitwise_right_shift"),
    **dict.fromkeys(["greater"], "gt"),
    **dict.fromkeys(["less"], "lt"),
    **dict.fromkeys(["bfloat16", "bool", "byte", "char", "double", "float", "half", "int"], "to"),
    **dict.fromkeys(["clone", "contiguous", "detach", "long", "positive", "short"], "to"),
    **dict.fromkeys(["type", "type_as"], "to"),
}

LIBRARY = {"sqrt": "Sqrt", "exp": "Exp", "log": "Ln", "tanh": "Tanh", "expm1": "Expm1"}
"""Operations that torch computes by Intel's library, if built with it: ``vmsSqrt``, ``vmdSqrt``."""


def operation(node: fx.Node) -> str:
    """Return the name of a node's operation; the full name for functions that are not torch's."""
    if isinstance(node.target, str):
        name = node.target
    else:
        name = getattr(node.target, "__name__", str(node.target))
        own = [getattr(one, name, None) for one in (torch, Tensor, operator, functional)]
        if node.target not in own:
            return f"{getattr(node.target, '__module__', '')}.{name}"
    return _ALIASES.get(name, name)
