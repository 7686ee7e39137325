"""Rules that cannot be traced: the reference executor runs them, and ``explain`` says why."""

import itertools
from enum import Enum
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from functional_optim import Optimizer
from functional_optim.kernels import cache, foreach
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.errors import NotPointwiseError

from ...choices import case, pairs
from ..rules import Hyper, OneState, optimizer_of
from ..support import (
    LARGE,
    assert_same,
    bound_steps,
    copied,
    gradients,
    noise,
    pure_steps,
    steps_in_place,
    tree,
    why_not,
)

pytestmark = pytest.mark.usefixtures("near_borders")
ASKED = ("blocked", "compiled", "auto")
"""Executors that must not compile a rule that cannot be traced."""
Rules = dict[str, Any]


def require_blocked_is_reference(optimizer: Optimizer) -> None:
    other = optimizer.using(executor="blocked")
    want = pure_steps(optimizer, tree(0), gradients)
    for run in (pure_steps, steps_in_place, bound_steps):
        assert_same(run(other, tree(0), gradients), want)


def loops_over_a_list(p: Any, g: Any, s: Any, c: Any) -> Any:
    for _ in p.reshape(-1)[:1]:
        g = g + 0.5
    return p - c.lr * g, s


def with_zeros(new: Any, mask: Any) -> Any:
    new.__setitem__(mask, 0.0)  # a statement would raise a TypeError while tracing
    return new


REASONS: dict[str, Rules] = {
    "mine branches on a number or on data": {
        "branches": lambda p, g, s, c: (p - c.lr * g if c.lr > 0.1 else p, OneState(s.kept * 2))
    },
    "mine cannot be traced: TypeError": {"a number": lambda p, g, s, c: (p - float(c.lr) * g, s)},
    "mine ": {"loops": loops_over_a_list},
    "which writes in place: rules are pure": {
        "adds": lambda p, g, s, c: (p.clone().add_(g, alpha=-0.5), OneState(s.kept.clone() * 0.5)),
        "scales": lambda p, g, s, c: (p - g, OneState(s.kept.clone().mul_(0.5))),
        "out": lambda p, g, s, c: (torch.add(p, g, out=torch.empty_like(g)), OneState(s.kept * 2)),
        "asks": lambda p, g, s, c: (p - functional.relu(g.clone(), inplace=True), s),
        "sets": lambda p, g, s, c: (with_zeros(p - g, p - g < 0), s),
    },
}


def test_they_run_by_the_reference_and_say_why() -> None:
    for reason, rules in REASONS.items():
        for name, rule in rules.items():
            with case(name=name):
                optimizer = optimizer_of(rule)
                require_blocked_is_reference(optimizer)
                for executor in ASKED:
                    said = why_not(executor, optimizer, torch.ones(LARGE))
                    assert said.startswith("reference") and reason in said
                bound = optimizer.using(executor="blocked").bind({"w": torch.ones(3)})
                assert reason in bound.explain()


A, B = 1.00001, 1.00002
FEW = (1.0, 2.0)
CONSTANTS: Rules = {
    "constants": lambda p, g, s, c: (p - c.lr * A * g, OneState(s.kept * A - g * B + FEW[1])),
    "new tensors": lambda p, g, s, c: (
        torch.zeros(p.shape, dtype=p.dtype) - c.lr * g,
        OneState(torch.zeros(g.shape, dtype=g.dtype) + p.numel() * 0),
    ),
}


def test_constants_and_new_tensors_are_part_of_a_graph() -> None:
    for name, rule in CONSTANTS.items():
        with case(name=name):
            assert why_not("blocked", optimizer_of(rule), torch.ones(3)) == "blocked"
            require_blocked_is_reference(optimizer_of(rule))


RANDOM: Rules = {
    "draws": lambda p, g, s, c: (p - torch.rand_like(p), OneState(torch.rand_like(p))),
    "drops": lambda p, g, s, c: (p - functional.dropout(g, 0.5), OneState(s.kept.bernoulli(0.5))),
}


def test_random_numbers_are_no_graph() -> None:
    for name, rule in RANDOM.items():
        with case(name=name):
            optimizer = optimizer_of(rule).using(executor="blocked")
            assert "which draws random numbers" in why_not("blocked", optimizer, torch.ones(3))
            torch.manual_seed(3)
            zeros, ones = torch.zeros(64), torch.ones(64)
            after, state = pure_steps(optimizer, zeros, lambda _, ones=ones: ones, 1)
            assert not torch.equal(-after, state.leaves.stages[0].kept)  # two draws, not one


def test_numbers_that_other_threads_draw_meanwhile_are_not_drawn_again() -> None:
    """A check of the stages does not restore the generator, which all threads share."""
    drawn: list[float] = []

    def draws_elsewhere(p: Any, g: Any, s: Any, c: Any) -> Any:
        thread = Thread(target=lambda: drawn.append(torch.rand(()).item()))
        thread.start()
        thread.join()
        return p - c.lr * g, s

    torch.manual_seed(5)
    pure_steps(optimizer_of(draws_elsewhere).using(executor="blocked"), tree(0), gradients)
    after = torch.rand(()).item()
    torch.manual_seed(5)
    assert [*drawn, after] == [torch.rand(()).item() for _ in range(len(drawn) + 1)]
    assert len(drawn) > 3


def to_half(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g, OneState(s.kept.to(torch.float16))


def to_bool(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g, OneState(g > 0)


def to_other_param(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return (p - c.lr * g).double(), s


def test_another_dtype_is_an_error_of_every_executor(executors: Any) -> None:
    for rule, executor in itertools.product((to_half, to_bool, to_other_param), executors):
        with case(rule=rule, executor=executor):
            optimizer = optimizer_of(rule).using(executor=executor)
            params, grads = ({"z": torch.ones(LARGE), "w": torch.ones(2)} for _ in range(2))
            state = optimizer.init(params)
            for step in (
                lambda o=optimizer, p=params, g=grads, s=state: o.update(p, g, s),
                lambda o=optimizer, p=params, g=grads, s=state: o.update_(p, g, s),
                lambda o=optimizer, p=params, g=grads: o.bind(copied(p)).step(g),
            ):
                with pytest.raises((RuntimeError, torch.jit.Error), match=r"must keep"):
                    step()


def test_a_state_that_becomes_a_number_is_an_error() -> None:
    for executor in ("reference", *ASKED):
        optimizer = optimizer_of(lambda p, g, s, c: (p - c.lr * g, OneState(c.lr)))
        optimizer = optimizer.using(executor=executor)
        state = optimizer.init(torch.ones(3))
        with pytest.raises((AttributeError, TypeError)):
            optimizer.update_(torch.ones(3), torch.ones(3), state)


def centers(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * (g - g.mean()), s


def sums_up(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g.cumsum(-1), s


CLAIMS: Rules = {
    "branches, centers": lambda p, g, s, c: (p - c.lr * (g - g.mean()) if c.lr > 0 else p, s),
    "normalises": lambda p, g, s, c: (p - c.lr * g / g.norm(), s),
    "centers": centers,
    "softens": lambda p, g, s, c: (p - c.lr * torch.softmax(g, dim=-1), s),
    "sums up": sums_up,
    "turns": lambda p, g, s, c: (p - c.lr * g.flip(-1), s),
    "looks ahead": lambda p, g, s, c: (
        p - c.lr * g.reshape(-1).flip(0).cumsum(0).flip(0).reshape(g.shape),
        s,
    ),
    "rolls": lambda p, g, s, c: (p - c.lr * g.roll(1, -1), s),
    "sorts": lambda p, g, s, c: (p - c.lr * g.sort(dim=-1).values, s),
    "unit": lambda p, g, s, c: (p - c.lr * functional.normalize(g, dim=-1), s),
}


def require_refused(rule: Any, executor: Any) -> None:
    """Require that every kind of step refuses the rule before it writes to a tensor."""
    optimizer = optimizer_of(rule).using(executor=executor)
    for key, count in {"w": 5, "z": LARGE}.items():
        params, grads = {key: noise(0, count)}, {key: noise(1, count)}
        state, bound = optimizer.init(params), optimizer.bind({key: noise(0, count)})
        steps = [
            lambda p=params, g=grads, s=state: optimizer.update_(p, g, s),
            lambda g=grads, one=bound: one.step(g),
            lambda p=params, g=grads, s=state: optimizer.update(p, g, s),
        ]
        for step in steps:
            with pytest.raises(NotPointwiseError, match=r"kind='per_matrix'"):
                step()
        assert_same((params, bound.params), ({key: noise(0, count)},) * 2)


def test_what_only_claims_to_be_pointwise_is_refused() -> None:
    for one in pairs(name=CLAIMS, executor=ASKED):
        with case(**one):
            require_refused(CLAIMS[one["name"]], one["executor"])


def test_a_coefficient_of_zero_hides_nothing() -> None:
    """A learning rate may begin at zero; once it does not, the same program steps pieces."""
    for executor in ASKED:
        with case(executor=executor):
            optimizer = optimizer_of(sums_up).using(executor=executor)
            params, grads = noise(0, LARGE), noise(1, LARGE)
            with pytest.raises(NotPointwiseError, match=r"kind='per_matrix'"):
                optimizer.update(params, grads, optimizer.init(params), lr=0.0)


def test_per_matrix_they_run() -> None:
    for name in ("softens", "sums up", "normalises"):
        with case(name=name):
            require_blocked_is_reference(optimizer_of(CLAIMS[name], kind="per_matrix"))


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Pair(NamedTuple):
    low: float
    high: float


class Odd(NamedTuple):
    """Coefficients of every type that a rule can branch on or compute with."""

    lr: float
    cap: float | None
    floor: float | None
    pair: Pair
    weights: tuple[float, ...]
    scales: list[float]
    nested: tuple[tuple[float, int], bool]
    mode: Mode
    name: str
    count: int
    whole: float
    flag: bool


def odd_coefficients(step: float, hyper: Hyper) -> Odd:
    return Odd(
        hyper.lr / step,
        None,
        0.25 * step,
        Pair(-1.0, 1.0 / step),
        (0.5, step, 0.125),
        [1.0, 0.5 / step],
        ((step, 2), True),
        Mode.SLOW,
        "w",
        3,
        int(step),
        flag=False,
    )


def odd_rule(p: Tensor, g: Tensor, s: OneState, c: Odd) -> tuple[Tensor, OneState]:
    if c.cap is not None:
        g = g.clamp(max=c.cap)
    if c.floor is not None:
        g = g + c.floor
    if c.mode is Mode.SLOW and c.name == "w" and not c.flag:
        g = g * c.pair.high + c.pair.low
    for weight in c.weights:
        g = g + weight
    for scale in c.scales:
        g = g * scale
    (of_step, power), active = c.nested
    if active:
        g = g / of_step
    for _ in range(c.count):
        g = g + c.whole
    return p - c.lr * g**power, OneState(s.kept * c.lr)


def test_coefficients_of_every_type() -> None:
    optimizer = optimizer_of(odd_rule, coefficients=odd_coefficients)
    assert why_not("blocked", optimizer, torch.ones(3)) == "blocked"
    foreach._PROGRAMS.clear()
    require_blocked_is_reference(optimizer)
    made = len(foreach._PROGRAMS)
    pure_steps(optimizer.using(executor="blocked"), tree(0), gradients, 9)
    assert len(foreach._PROGRAMS) == made  # programs do not depend on the numbers


class Unkept(NamedTuple):
    lr: float
    table: dict[str, float]


def test_a_coefficient_that_changes_in_place_is_refused() -> None:
    optimizer = optimizer_of(
        lambda p, g, s, c: (p - c.table["lr"] * g, s),
        coefficients=lambda step, hyper: Unkept(hyper.lr, {"lr": hyper.lr / step}),
    )
    require_blocked_is_reference(optimizer)
    assert "a coefficient of type dict" in why_not("blocked", optimizer, torch.ones(3))


class Counted(NamedTuple):
    lr: float
    step: int


def test_a_step_count_that_looks_like_a_choice_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 20)
    monkeypatch.setattr(foreach, "_PROGRAMS", Cache())
    optimizer = optimizer_of(
        lambda p, g, s, c: (p - c.lr * g / c.step, s),
        coefficients=lambda step, hyper: Counted(hyper.lr, int(step)),
    ).using(executor="blocked")
    param = torch.ones(3)
    state = optimizer.init(param)
    for step in range(30):
        optimizer.update_(param, torch.ones(3), state)
        assert step % 20 < len(foreach._PROGRAMS) <= 20 or step >= 20
        assert len(foreach._PROGRAMS) <= 20
