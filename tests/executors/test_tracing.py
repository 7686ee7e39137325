"""What a graph cannot be made of: it runs by the reference executor, and is told why."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from functional_optim import Optimizer, Rule, chain
from functional_optim.executors import blocked
from functional_optim.executors.errors import NotPointwiseError

from .rules import Hyper, OneState, one_init
from .support import assert_same, bound_steps, gradients, pure_steps, steps_in_place, tree, why_not

Function = Callable[[Tensor, Tensor, OneState, Any], tuple[Tensor, OneState]]
TEMPLATE = Rule(name="mine", hyper=Hyper, state=OneState, init=one_init, rule=lambda *_: _)


def optimizer_of(rule: Function, **fields: Any) -> Optimizer:
    return chain(replace(TEMPLATE, rule=rule, **fields)(lr=0.3))


def require_blocked_is_reference(optimizer: Optimizer) -> None:
    other = optimizer.using(executor="blocked")
    want = pure_steps(optimizer, tree(0), gradients)
    for run in (pure_steps, steps_in_place, bound_steps):
        assert_same(run(other, tree(0), gradients), want)


def branches_on_a_float(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return (p - c.lr * g if c.lr > 0.1 else p), OneState(s.kept * 2)


def converts_a_float(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p - float(c.lr) * g, s


def loops_over_a_list(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    for _ in p.reshape(-1)[:1]:
        g = g + 0.5
    return p - c.lr * g, s


REASONS: dict[str, tuple[Function, str]] = {
    "branch": (branches_on_a_float, "mine branches on a number or on data"),
    "conversion": (converts_a_float, "mine cannot be traced: TypeError"),
    "loop": (loops_over_a_list, "mine "),
}


@pytest.mark.parametrize("name", REASONS)
def test_they_run_by_the_reference_and_say_why(name: str) -> None:
    rule, reason = REASONS[name]
    optimizer = optimizer_of(rule)
    require_blocked_is_reference(optimizer)
    for executor in ("blocked", "auto", "compile"):
        said = why_not(executor, optimizer, torch.ones(40_000))
        assert said.startswith("reference"), said
        assert reason in said
    bound = optimizer.using(executor="blocked").bind({"w": torch.ones(3)})
    assert reason in bound.explain()


def test_reasons_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
        calls.append(type(p))
        return branches_on_a_float(p, g, s, c)

    optimizer = optimizer_of(counted).using(executor="blocked")
    steps_in_place(optimizer, tree(0), gradients, 5)
    assert sum(one is not Tensor for one in calls) == 1


A, B = torch.tensor(1.00001), torch.tensor(1.00002)  # which print alike
FEW = torch.arange(1.0, 3.0)


def uses_constants(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p - c.lr * A * g, OneState(s.kept * A - g * B + FEW[1])


def makes_tensors_of_shapes(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    zeros = torch.zeros(p.shape, dtype=p.dtype)
    return zeros - c.lr * g, OneState(torch.zeros(g.shape, dtype=g.dtype) + p.numel() * 0)


@pytest.mark.parametrize("rule", [uses_constants, makes_tensors_of_shapes])
def test_constants_and_new_tensors_are_part_of_a_graph(rule: Function) -> None:
    optimizer = optimizer_of(rule)
    assert why_not("blocked", optimizer, torch.ones(3)) == "blocked"
    require_blocked_is_reference(optimizer)


def adds_in_place(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p.clone().add_(g, alpha=-0.5), OneState(s.kept.clone().mul_(0.5))


def writes_to_out(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    room = torch.empty_like(g)
    torch.add(p, g, out=room)
    return room, OneState(s.kept * 2)


def asks_for_in_place(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p - functional.relu(g.clone(), inplace=True), s


@pytest.mark.parametrize("rule", [adds_in_place, writes_to_out, asks_for_in_place])
def test_writing_in_place_is_no_graph(rule: Function) -> None:
    optimizer = optimizer_of(rule)
    require_blocked_is_reference(optimizer)
    assert "which writes in place: rules are pure" in why_not("blocked", optimizer, torch.ones(3))


def draws(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p - torch.rand_like(p), OneState(torch.rand_like(p))


def drops(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p - functional.dropout(g, 0.5), OneState(s.kept.bernoulli(0.5))


@pytest.mark.parametrize("rule", [draws, drops])
def test_random_numbers_are_no_graph(rule: Function) -> None:
    optimizer = optimizer_of(rule)
    assert "which draws random numbers" in why_not("blocked", optimizer, torch.ones(3))
    torch.manual_seed(3)
    after, state = pure_steps(
        optimizer.using(executor="blocked"), torch.zeros(9), lambda _: torch.ones(9), 1
    )
    assert not torch.equal(-after, state.leaves.stages[0].kept)  # two draws, not one


def to_single(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g, OneState(s.kept.to(torch.float16))


def to_bool(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g, OneState(g > 0)


def to_number(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g, OneState(c.lr)


def to_other_param(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return (p - c.lr * g).double(), s


@pytest.mark.parametrize("rule", [to_single, to_bool, to_other_param])
@pytest.mark.parametrize("executor", ["reference", "blocked", "compile", "auto", "script"])
def test_another_dtype_is_an_error_of_every_executor(rule: Function, executor: Any) -> None:
    optimizer = optimizer_of(rule).using(executor=executor)
    params = {"z": torch.ones(40_000), "w": torch.ones(2)}
    grads = {"z": torch.ones(40_000), "w": torch.ones(2)}
    state = optimizer.init(params)
    with pytest.raises((RuntimeError, torch.jit.Error), match=r"must keep"):
        optimizer.update(params, grads, state)
    with pytest.raises((RuntimeError, torch.jit.Error), match=r"must keep"):
        optimizer.update_(params, grads, state)
    bound = optimizer.bind({"z": torch.ones(40_000)})
    with pytest.raises((RuntimeError, torch.jit.Error), match=r"must keep"):
        bound.step({"z": torch.ones(40_000)})


def test_a_state_that_becomes_a_number_is_an_error() -> None:
    for executor in ("reference", "blocked", "auto"):
        optimizer = optimizer_of(to_number).using(executor=executor)
        state = optimizer.init(torch.ones(3))
        with pytest.raises((AttributeError, TypeError)):
            optimizer.update_(torch.ones(3), torch.ones(3), state)


def normalises(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g / g.norm(), s


def centers(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * (g - g.mean()), s


def softens(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * torch.softmax(g, dim=-1), s


def sums_up(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g.cumsum(-1), s


def turns(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g.flip(-1), s


def rolls(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * g.roll(1, -1), s


def sorts(p: Tensor, g: Tensor, s: OneState, c: Any) -> tuple[Tensor, OneState]:
    return p - c.lr * g.sort(dim=-1).values, s


def unit(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return p - c.lr * functional.normalize(g, dim=-1), s


def branches_and_centers(p: Tensor, g: Tensor, s: OneState, c: Hyper) -> tuple[Tensor, OneState]:
    return (p - c.lr * (g - g.mean()) if c.lr > 0 else p), s


CLAIMS = [
    branches_and_centers,
    normalises,
    centers,
    softens,
    sums_up,
    turns,
    rolls,
    sorts,
    unit,
]


@pytest.mark.parametrize(
    ("rule", "executor"),
    [
        *itertools.product(CLAIMS, ["blocked", "compile", "auto"]),
        *((rule, "script") for rule in CLAIMS if rule is not sorts),
    ],
)
def test_what_only_claims_to_be_pointwise_is_refused(rule: Function, executor: Any) -> None:
    optimizer = optimizer_of(rule).using(executor=executor)
    for params in ({"w": torch.ones(5)}, {"z": torch.zeros(40_000)}):
        state, grads = (
            optimizer.init(params),
            {key: torch.ones_like(p) for key, p in params.items()},
        )
        before = {key: p.clone() for key, p in params.items()}
        if executor != "script":  # its pure step goes leaf by leaf
            with pytest.raises(NotPointwiseError, match=r"kind='per_matrix'"):
                optimizer.update(params, grads, state)
        with pytest.raises(NotPointwiseError, match=r"kind='per_matrix'"):
            optimizer.update_(params, grads, state)
        bound = optimizer.bind(params)
        with pytest.raises(NotPointwiseError, match=r"kind='per_matrix'"):
            bound.step(grads)
        assert_same(params, before)


@pytest.mark.parametrize("rule", [softens, sums_up, normalises])
def test_per_matrix_they_run(rule: Function) -> None:
    require_blocked_is_reference(optimizer_of(rule, kind="per_matrix"))


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Pair(NamedTuple):
    low: float
    high: float


class Odd(NamedTuple):
    """Coefficients of every type that a rule may branch on or compute with."""

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
    blocked._PROGRAMS.clear()
    require_blocked_is_reference(optimizer)
    made = len(blocked._PROGRAMS)
    pure_steps(optimizer.using(executor="blocked"), tree(0), gradients, 9)
    assert len(blocked._PROGRAMS) == made  # the numbers are no part of a program


class Unkept(NamedTuple):
    lr: float
    table: dict[str, float]


def test_a_coefficient_that_changes_in_place_is_refused() -> None:
    def rule(p: Tensor, g: Tensor, s: OneState, c: Unkept) -> tuple[Tensor, OneState]:
        return p - c.table["lr"] * g, s

    optimizer = optimizer_of(
        rule, coefficients=lambda step, hyper: Unkept(hyper.lr, {"lr": hyper.lr / step})
    )
    require_blocked_is_reference(optimizer)
    assert "a coefficient of type dict" in why_not("blocked", optimizer, torch.ones(3))


class Counted(NamedTuple):
    lr: float
    step: int


def test_a_step_count_that_looks_like_a_choice_fills_no_memory() -> None:
    def rule(p: Tensor, g: Tensor, s: OneState, c: Counted) -> tuple[Tensor, OneState]:
        return p - c.lr * g / c.step, s

    optimizer = optimizer_of(
        rule, coefficients=lambda step, hyper: Counted(hyper.lr, int(step))
    ).using(executor="blocked")
    param = torch.ones(3)
    state = optimizer.init(param)
    for _ in range(blocked.PROGRAMS + 20):
        optimizer.update_(param, torch.ones(3), state)
    assert len(blocked._PROGRAMS) <= blocked.PROGRAMS
