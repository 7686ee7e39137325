"""Support for the tests of exact loops: rules from one function, and numbers of every kind."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, chain
from functional_optim.testing.compare import snapshot

from ..support import assert_same, copied, tensors


class Numbers(NamedTuple):
    """Coefficients of the test rules, which do not branch on them."""

    a: float = 0.9
    b: float = -0.3
    c: float = 1e-3
    d: float = 2.5


class Several(NamedTuple):
    """State of several tensors."""

    kept: list[Tensor]  # each has the parameter's shape and dtype


Function = Callable[[Tensor, Tensor, list[Tensor], Numbers], list[Tensor]]
"""Function of parameter, gradient, states, and coefficients; returns new parameter and states."""


def optimizer_of(function: Function, states: int, **numbers: float) -> Optimizer:
    """Return a chain of one rule, which calls a function."""

    def rule(p: Tensor, g: Tensor, s: Several, c: Numbers) -> tuple[Tensor, Several]:
        param, *kept = function(p, g, s.kept, c)
        return param, Several(kept)

    def init(p: Tensor, hyper: Numbers) -> Several:
        return Several([torch.full_like(p, 0.25 * (k + 1)) for k in range(states)])

    made = Rule(name="function", hyper=Numbers, state=Several, init=init, rule=rule)
    return chain(made(**numbers))


def drawn(seed: int, count: int, dtype: torch.dtype, *, style: str) -> Tensor:
    """Return random numbers: "plain" ones, of all magnitudes ("wide"), or with "special" ones.

    Special numbers are zeros, denormals, infinities, NaN, and the ends of the ranges of integers.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(count, generator=generator, dtype=torch.float64)
    if style == "plain":
        return plain.to(dtype)
    info = torch.finfo(dtype)
    if style == "wide":
        top = 900 if dtype == torch.float64 else 120 if dtype != torch.float16 else 12
        powers = torch.randint(-top, top, (count,), generator=generator).double().exp2()
        return (plain * powers).to(dtype)
    inf, whole = float("inf"), [127.0, 128.0, 255.0, 256.0, 2.0**31, -(2.0**31)]
    odd = [0.0, -0.0, info.tiny / 8, -info.tiny / 8, info.tiny, info.max, -info.max, inf, -inf]
    odd += [float("nan"), 1.0, -1.0, 0.5, *whole]
    special = torch.tensor(odd, dtype=torch.float64).to(dtype)
    which = torch.randint(len(odd), (count,), generator=generator)
    return torch.where(
        torch.rand(count, generator=generator) < 0.5, special[which], plain.to(dtype)
    )


STYLES = ("plain", "wide", "special")


def explained(optimizer: Optimizer, params: Any, executor: Any = "compiled") -> str:
    """Return the name of the kernel that steps these parameters, and why."""
    return optimizer.using(executor=executor).explain(params).partition(": ")[2]


def assert_equal(got: Any, want: Any) -> None:
    """Require equal bits, except that any two NaN are equal."""
    assert_same(*(_without_nan(tree) for tree in (got, want)))


def _without_nan(tree: Any) -> Any:
    made = copied(tree)
    for one in tensors(made):
        if one.is_floating_point():
            one.masked_fill_(one.isnan(), float("nan"))
    return made


def assert_steps_are_equal(
    optimizer: Optimizer,
    params: Any,
    gradient: Callable[[int], Any],
    *,
    executor: Any = "compiled",
    steps: int = 3,
    state: Any = None,
) -> None:
    """Require that pure steps and steps in place equal the reference's, bit for bit."""
    reference, other = optimizer.using(executor="reference"), optimizer.using(executor=executor)
    want, want_state = snapshot(params), optimizer.init(params) if state is None else state
    pure, pure_state = snapshot(want), snapshot(want_state)
    ours, own = snapshot(want), snapshot(want_state)
    for step in range(steps):
        grads = gradient(step)
        want, want_state = reference.update(want, grads, want_state)
        pure, pure_state = other.update(pure, grads, pure_state)
        other.update_(ours, grads, own)
        assert_equal((pure, pure_state), (want, want_state))
        assert_equal((ours, own), (want, want_state))
