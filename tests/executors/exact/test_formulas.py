"""Each formula equals torch's result, on numbers of every kind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from functional_optim.kernels.exact.formulas import FORMULAS

from ...choices import case
from .support import STYLES, Numbers, assert_equal, drawn, explained, optimizer_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENGTHS = (1, 7, 129, 4_100)


def whole(x: Any, dtype: torch.dtype = torch.int32) -> Any:
    """Return the tensor converted to integers."""
    return torch.where(x.isnan(), 0.0, x).clamp(-100, 100).to(dtype)


# Each call gets two tensors x and y, and coefficients c. Torch's maximum can return a zero of
# either sign, so the call adds zero. No call reads the sign of a NaN.
CALLS: dict[str, list[Callable[..., Any]]] = {
    "add": [
        lambda x, y, c: x + y,
        lambda x, y, c: torch.add(x, y),
        lambda x, y, c: c.a + x,
        lambda x, y, c: x + 3,
        lambda x, y, c: x + whole(y),
    ],
    "sub": [
        lambda x, y, c: x - y,
        lambda x, y, c: x - c.b,
        lambda x, y, c: torch.subtract(x, 0.1),
    ],
    "rsub": [lambda x, y, c: c.a - x, lambda x, y, c: torch.rsub(x, y), lambda x, y, c: 1 - x],
    "mul": [
        lambda x, y, c: x * y,
        lambda x, y, c: x * (c.a * c.b),
        lambda x, y, c: x * (y > 0),
        lambda x, y, c: (whole(x) * c.a).to(x.dtype),
    ],
    "div": [
        lambda x, y, c: x / y,
        lambda x, y, c: x / c.d,
        lambda x, y, c: c.d / x,
        lambda x, y, c: torch.true_divide(x, 3),
        lambda x, y, c: (whole(x) / whole(y)).to(x.dtype),
    ],
    "neg": [lambda x, y, c: -x, lambda x, y, c: (-whole(x)).to(x.dtype)],
    "abs": [lambda x, y, c: abs(x), lambda x, y, c: whole(x, torch.int8).abs().to(x.dtype)],
    "sign": [lambda x, y, c: x.sign(), lambda x, y, c: torch.sgn(x)],
    "square": [lambda x, y, c: x.square()],
    "reciprocal": [lambda x, y, c: x.reciprocal()],
    "pow": [
        lambda x, y, c: x**2,
        lambda x, y, c: x.pow(3),
        lambda x, y, c: x**-1,
        lambda x, y, c: torch.pow(x, -2.0),
        lambda x, y, c: x**1.0,
    ],
    "lerp": [
        lambda x, y, c: torch.lerp(x, y, c.a),
        lambda x, y, c: x.lerp(y, c.c),
        lambda x, y, c: x.lerp(y, c.b),
        lambda x, y, c: x.lerp(y, c.d),
    ],
    "addcmul": [
        lambda x, y, c: torch.addcmul(x, y, y, value=c.c),
        lambda x, y, c: x.addcmul(y, x),
    ],
    "addcdiv": [
        lambda x, y, c: torch.addcdiv(x, y, x, value=c.b),
        lambda x, y, c: x.addcdiv(x, y),
    ],
    "clamp": [
        lambda x, y, c: x.clamp(c.b, c.a),
        lambda x, y, c: torch.clip(x, max=c.d),
        lambda x, y, c: x.clamp(min=y) + 0.0,
        lambda x, y, c: torch.clamp(x, y, x) + 0.0,
    ],
    "clamp_min": [lambda x, y, c: x.clamp_min(0.0)],
    "clamp_max": [lambda x, y, c: x.clamp_max(c.b)],
    "maximum": [lambda x, y, c: torch.maximum(x, y) + 0.0],
    "minimum": [lambda x, y, c: torch.minimum(x, y) + 0.0],
    "where": [
        lambda x, y, c: torch.where(x > y, x, y),
        lambda x, y, c: torch.where(x.isnan(), c.a, x),
    ],
    "masked_fill": [
        lambda x, y, c: x.masked_fill(y > c.b, c.a),
        lambda x, y, c: x.masked_fill(y > 0, False),
    ],
    "bitwise_and": [
        lambda x, y, c: x * ((x > 0) & (y > 0)),
        lambda x, y, c: (whole(x) & 7).to(x.dtype),
        lambda x, y, c: x * ((x > 0) & True),
    ],
    "bitwise_or": [
        lambda x, y, c: x * ((x > 0) | (y > 0)),
        lambda x, y, c: (whole(x) | whole(y)).to(x.dtype),
    ],
    "bitwise_xor": [
        lambda x, y, c: x * ((x > 0) ^ (y > 0)),
        lambda x, y, c: (whole(x, torch.int16) ^ 5).to(x.dtype),
    ],
    "bitwise_not": [
        lambda x, y, c: x * ~(x > 0),
        lambda x, y, c: (~whole(x, torch.int64)).to(x.dtype),
    ],
    "bitwise_left_shift": [lambda x, y, c: (whole(x) << 2).to(x.dtype)],
    "bitwise_right_shift": [lambda x, y, c: (whole(x) >> 1).to(x.dtype)],
    "logical_and": [lambda x, y, c: x * torch.logical_and(x, y)],
    "logical_or": [lambda x, y, c: x * torch.logical_or(x > 0, y)],
    "logical_xor": [lambda x, y, c: x * torch.logical_xor(x, y > 0)],
    "logical_not": [lambda x, y, c: torch.logical_not(x).to(x.dtype)],
    "signbit": [lambda x, y, c: torch.where(x.isnan(), 1.0, x).signbit().to(x.dtype)],
    "to": [
        lambda x, y, c: x.double().to(y),
        lambda x, y, c: x.to(torch.bfloat16).type_as(y),
        lambda x, y, c: x.half().to(dtype=y.dtype),
        lambda x, y, c: whole(x, torch.uint8).to(y.dtype),
        lambda x, y, c: x.bool().to(y.dtype),
        lambda x, y, c: x.clone().detach().contiguous(),
    ],
    "zeros_like": [lambda x, y, c: torch.zeros_like(x)],
    "ones_like": [lambda x, y, c: torch.ones_like(x)],
    "full_like": [
        lambda x, y, c: torch.full_like(x, c.a),
        lambda x, y, c: torch.full_like(x, -0.1),
    ],
    "fill": [lambda x, y, c: torch.fill(x, c.b)],
    "new_full": [
        lambda x, y, c: x.new_full(x.shape, c.a),
        lambda x, y, c: x * x.new_full(x.shape, 0.7 * c.a).sqrt(),
    ],
    "sqrt": [
        lambda x, y, c: x.sqrt(),
        lambda x, y, c: (x.abs() + y.abs()).sqrt(),
        lambda x, y, c: torch.sqrt(x).sqrt(),
    ],
    "gt": [lambda x, y, c: (x > y).to(x.dtype), lambda x, y, c: (x > c.a).to(x.dtype)],
    "ge": [lambda x, y, c: (x >= y).to(x.dtype), lambda x, y, c: (whole(x) >= 0.5).to(x.dtype)],
    "lt": [lambda x, y, c: (x < y).to(x.dtype), lambda x, y, c: (whole(x) < 1.5).to(x.dtype)],
    "le": [lambda x, y, c: (x <= y).to(x.dtype), lambda x, y, c: (c.b <= x).to(x.dtype)],
    "eq": [lambda x, y, c: (x == y).to(x.dtype), lambda x, y, c: ((x > 0) == 2).to(x.dtype)],
    "ne": [lambda x, y, c: (x != y).to(x.dtype), lambda x, y, c: ((x > 0) != y).to(x.dtype)],
    "isnan": [lambda x, y, c: x.isnan().to(x.dtype)],
    "isinf": [lambda x, y, c: x.isinf().to(x.dtype)],
    "isfinite": [lambda x, y, c: x.isfinite().to(x.dtype)],
}
SHORT = (torch.bfloat16, torch.float16)
ROUNDED_BY_PLACE: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(["lerp", "addcmul", "addcdiv"], SHORT),
    "pow": (torch.float16,),
}
"""Functions and dtypes for which torch's result depends on the position of an element."""


def test_every_formula_is_tried() -> None:
    assert set(CALLS) == set(FORMULAS)


def groups(dtype: torch.dtype) -> Iterator[tuple[str, ...]]:
    """Yield groups of formulas; a formula without a unique result has its own group."""
    whole = [name for name in CALLS if dtype not in ROUNDED_BY_PLACE.get(name, ())]
    yield from (tuple(whole[at : at + 10]) for at in range(0, len(whole), 10))
    yield from ((name,) for name in CALLS if name not in whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formulas_are_what_torch_computes(dtype: torch.dtype) -> None:
    """The formulas of a group, as results of one rule, equal torch's operations."""
    for names in groups(dtype):
        calls = [call for name in names for call in CALLS[name]]

        def function(p: Any, g: Any, s: Any, c: Numbers, calls: Any = tuple(calls)) -> list[Any]:
            return [call(p, g, c) for call in calls]

        optimizer = optimizer_of(function, len(calls) - 1)
        said = explained(optimizer, torch.ones(300, dtype=dtype))
        refused = dtype in ROUNDED_BY_PLACE.get(names[0], ())
        with case(names=names):
            assert said.startswith("blocked" if refused else "exact"), said
            tried(optimizer, dtype)


def tried(optimizer: Any, dtype: torch.dtype) -> None:
    reference, compiled = (optimizer.using(executor=one) for one in ("reference", "compiled"))
    for seed, style in enumerate(STYLES):
        for count in LENGTHS:
            p, g = (drawn(2 * seed + k, count, dtype, style=style) for k in (0, 1))
            state = optimizer.init(p)
            assert_equal(compiled.update(p, g, state), reference.update(p, g, state))
