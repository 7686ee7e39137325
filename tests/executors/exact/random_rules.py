"""Random rules of one to twelve torch operations, which can return any of their values."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer

from .support import optimizer_of

FLOATS = """
{f} + {f}|{f} - {f}|{f} * {f}|{f} / {f}|{f} / ({f}.abs() + 1e-3)|{f} + {n}|{n} - {f}|{f} - {n}
{f} * {n}|{n} * {f}|{f} / {n}|{n} / {f}|torch.add({f}, {f}, alpha={n})|{f}.sub({f}, alpha={n})
torch.rsub({f}, {f})|torch.addcmul({f}, {f}, {f}, value={n})|{f}.addcmul({f}, {f})
torch.addcdiv({f}, {f}, {f}, value={n})|{f}.addcdiv({f}, {f})|torch.lerp({f}, {f}, {n})
{f}.sqrt()|{f}.abs().sqrt()|torch.sqrt({f}.square() + c.c)|{f}.sqrt().sqrt()|-{f}|{f}.sign()
{f}.square()|{f}.reciprocal()|{f} ** 2|{f}.pow(3)|{f} ** -1|torch.pow({f}, -2)|{f}.abs()
torch.maximum({f}, {f}) + 0.0|torch.minimum({f}, {f}) + 0.0|{f}.clamp(min=c.b, max=c.a)
{f}.clamp(min={f}) + 0.0|torch.clamp({f}, max={n})|{f}.clamp_min({n})|{f}.clamp_max({n})
torch.zeros_like({f})|torch.ones_like({f})|torch.full_like({f}, {n})|{f}.clone()|{f}.view_as(p)
{f}.reshape(-1).view_as(p)|{f}.detach()|{f}.double().mul(c.a).to(p.dtype)
{f}.to(torch.bfloat16).to(p.dtype)|{f}.half().type_as(p)|{f}.exp()|{f}.tanh()
({f}.abs() + 1e-3).log()|({f} > 0).to(p.dtype)|torch.where({f} > {n}, {f}, {f})
torch.where({f}.isnan(), {n}, {f})|{f} * ({f} < {f})|{f}.masked_fill({f} <= 0, {n})
{f}.masked_fill({f} != {f}, False)|number({f}, 1.0).signbit().to(p.dtype)
number({f}, 0.5).clamp(-1e4, 1e4).int().to(p.dtype)|({f} == {n}).to(p.dtype)
"""
OF_BOOLS = """
torch.where({b}, {f}, {f})|{f}.masked_fill({b}, {n})|{f} * {b}|{b}.to(p.dtype)
torch.where({b}, {n}, {f})
"""
OF_WHOLES = "{f} + {i}|{i}.to(p.dtype)|{i} * {n} + {f}|{f} * {i}|torch.where({i} > 0.5, {f}, {f})"
BOOLS = """
{f} > {f}|{f} >= {n}|{f} < {f}|{f} <= {n}|{f} == {f}|{f} != {n}|{f}.isnan()|{f}.isfinite()
{f}.isinf()|torch.gt({f}, {f})|torch.logical_not({f})|{f}.bool()
"""
BOOLS_OF_BOOLS = """
{b} & {b}|{b} \\| {b}|~{b}|{b} ^ {b}|torch.logical_and({b}, {f})|{b} & ({f} > 0)|{b} == {b}
{b} & True
"""
WHOLES = """
number({f}, 0.0).clamp(-1e4, 1e4).to(torch.int32)|({f} > 0).int()
number({f}, 0.0).clamp(-100, 100).to(torch.int16)
number({f}, 0.0).sign().to(torch.int64)
"""
WHOLES_OF_WHOLES = """
{i} + {i}|{i} * {i}|{i} & 7|{i} << 2|{i} >> 1|~{i}|-{i}|{i}.abs()|{i}.clamp(-5, 5)
torch.where({f} > 0, {i}, 0)
"""
NUMBERS = ["c.a", "c.b", "c.c", "c.d", "0.5", "2.0", "0.0", "-1.5", "3", "c.a * c.b", "1.0 - c.a"]


def number(x: Tensor, instead: float) -> Tensor:
    """Replace NaN, because processors do not agree on its sign or its integer value."""
    return torch.where(x.isnan(), instead, x)


def _templates(text: str) -> list[str]:
    lines = text.strip().splitlines()
    return [
        one.replace("\\|", "|") for line in lines for one in re.split(r"(?<!\\)\|", line) if one
    ]


class RandomRule(NamedTuple):
    """Source text of a rule, and its number of states."""

    text: str
    states: int

    @property
    def function(self) -> Callable[..., Any]:
        """Return the rule as a function."""
        scope: dict[str, Any] = {"torch": torch, "number": number}
        exec(self.text, scope)
        found: Callable[..., Any] = scope["function"]
        return found

    def optimizer(self, **numbers: float) -> Optimizer:
        """Return a chain of this rule."""
        return optimizer_of(self.function, self.states, **numbers)

    def __repr__(self) -> str:
        return f"\n{self.text}"


class _Pools:
    """Operands that a line can use, by kind."""

    def __init__(self, draw: Any, states: int) -> None:
        self.draw = draw
        self.named: dict[str, list[str]] = {
            "f": ["p", "g", *(f"s[{k}]" for k in range(states))],
            "b": [],
            "i": [],
            "n": NUMBERS,
        }

    def one(self, kind: str) -> str:
        pool = self.named[kind]
        late = pool[-4:] if kind != "n" and self.draw(st.booleans()) else pool
        found: str = self.draw(st.sampled_from(late))
        return found

    def line(self, number: int) -> str:
        bools, wholes = self.named["b"], self.named["i"]
        kind = self.draw(st.sampled_from("fffffbi"))
        text = {
            "f": FLOATS + OF_BOOLS * bool(bools) + OF_WHOLES * bool(wholes),
            "b": BOOLS + BOOLS_OF_BOOLS * bool(bools),
            "i": WHOLES + WHOLES_OF_WHOLES * bool(wholes),
        }[kind]
        template = self.draw(st.sampled_from(_templates(text)))
        value = re.sub(r"\{(\w)\}", lambda found: self.one(found.group(1)), template)
        self.named[kind].append(f"{kind}{number}")
        return f"    {kind}{number} = {value}"


@st.composite
def random_rules(draw: Any) -> RandomRule:
    """Draw a rule whose results can be any of its values, such as an argument."""
    states = draw(st.integers(0, 3))
    pools = _Pools(draw, states)
    lines = [pools.line(number) for number in range(draw(st.integers(1, 12)))]
    results = ", ".join(pools.one("f") for _ in range(states + 1))
    body = "\n".join(lines)
    return RandomRule(f"def function(p, g, s, c):\n{body}\n    return [{results}]\n", states)


def numbers() -> Any:
    """Return a strategy for coefficients, such as zero, one, negative, and close to a half."""
    one = st.sampled_from([0.9, -0.3, 1e-3, 2.5, 0.0, 1.0, -1.0, 0.4999999, 0.5000001, 40.0])
    return st.fixed_dictionaries({}, optional=dict.fromkeys("abcd", one))
