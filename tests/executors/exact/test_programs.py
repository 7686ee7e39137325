"""Chains as loops: which there are, which there cannot be, and how a wrong one is found out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, lion, rprop, sgd
from functional_optim.executors.exact import kernel, program
from functional_optim.executors.exact.formulas import FORMULAS
from functional_optim.executors.exact.phases import Variant
from functional_optim.testing import CASES, CHAINS

from ..rules import RULES, VARIANTS
from ..support import gradients, noise, tree
from .support import (
    Numbers,
    assert_equal,
    assert_steps_are_equal,
    drawn,
    explained,
    optimizer_of,
)

NO_FORMULA = frozenset({"library", "powers"})
"""Rules that call what has no formula."""


@pytest.mark.parametrize("name", [*RULES, *VARIANTS])
@pytest.mark.parametrize("executor", ["compile", "auto"])
def test_rules_are_the_reference(name: str, executor: Any) -> None:
    optimizer = {**RULES, **VARIANTS}[name]
    said = explained(optimizer, tree(0)["z"])
    assert said.startswith("blocked" if name in NO_FORMULA else "exact"), said
    assert_steps_are_equal(optimizer, tree(0), gradients, executor=executor)


@pytest.mark.parametrize("name", [*CASES, *CHAINS])
def test_every_algorithm_is_compiled(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        optimizer = {**CASES, **CHAINS}[name].factory()
        assert explained(optimizer, torch.ones(300, dtype=dtype)).startswith("exact")


SPECIAL = [0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, 1e20, -1e20, 1.0, 2e19, 5e-20]
SPECIAL += [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize(
    "optimizer", [adamw(), lion(), rprop(), RULES["selects"]], ids=lambda one: one.stages[-1].name
)
def test_values_that_are_not_finite_stay_so(optimizer: Optimizer) -> None:
    """What overflows, vanishes or is no number does so in every executor."""
    special = torch.tensor(SPECIAL)
    count = len(special)
    grads = special.repeat_interleave(count)
    assert_steps_are_equal(optimizer, special.repeat(count), lambda _: grads)


def sigmoid(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [p - c.c * torch.sigmoid(g)]


def odd_power(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [p - c.c * g.abs() ** 0.3]


def number_with_alpha(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [p - c.c * torch.add(g, c.d, alpha=c.a)]


def weights(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [torch.lerp(p, g, g.abs().clamp(max=1.0))]


def two_precisions(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [p.abs().sqrt() + g.double().abs().sqrt().to(p.dtype)]


REFUSED = [
    (sigmoid, "sigmoid has no formula that is torch's to the bit"),
    (odd_power, "a power of 0.3 is rounded by where an element stands"),
    (number_with_alpha, "multiply the number first"),
    (weights, "lerp with a weight per element has no formula"),
    (two_precisions, "roots in two precisions"),
]


@pytest.mark.parametrize(("function", "reason"), REFUSED)
@pytest.mark.parametrize("executor", ["compile", "auto"])
def test_what_has_no_one_result_is_blocked_and_why_is_said(
    function: Any, reason: str, executor: Any
) -> None:
    optimizer = optimizer_of(function, 0)
    said = explained(optimizer, noise(0, 70_001), executor)
    assert said.startswith("blocked; ") and reason in said
    assert_steps_are_equal(optimizer, tree(0), gradients, executor=executor)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("div", lambda at, x, y: f"{at(x)} * (({at(x)} * 0 + 1) / {at(y)})"),
        ("sign", lambda at, x: f"{at(x)} > 0 ? 1 : -1"),
        ("lerp", lambda at, x, y, w: f"{at(x)} + {at(w)} * ({at(y)} - {at(x)})"),
        ("maximum", lambda at, x, y: f"{at(x)} > {at(y)} ? {at(x)} : {at(y)}"),
        ("addcdiv", lambda at, x, a, b, value: f"mad({at(value)}, {at(a)} / {at(b)}, {at(x)})"),
        ("isfinite", lambda at, x: f"{at(x)} == {at(x)}"),
    ],
)
def test_a_wrong_formula_is_found_out(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its roundings, at special numbers, or at such numbers of a step as were not at hand."""
    calls: dict[str, Any] = {
        "div": lambda p, g, s, c: [p / g],
        "sign": lambda p, g, s, c: [g.sign()],
        "lerp": lambda p, g, s, c: [torch.lerp(p, g, c.c)],
        "maximum": lambda p, g, s, c: [torch.maximum(p, g)],
        "addcdiv": lambda p, g, s, c: [torch.addcdiv(p, g, p, value=c.a)],
        "isfinite": lambda p, g, s, c: [p * g.isfinite()],
    }
    monkeypatch.setitem(FORMULAS, name, wrong)
    optimizer = optimizer_of(calls[name], 0)
    said = explained(optimizer, noise(0, 70_001))
    assert said.startswith("blocked; no loop gives the bits of torch's operations")
    assert_steps_are_equal(optimizer, tree(0), gradients)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_of_the_variants_the_right_one_is_taken(
    fused: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is tried first; and where it is the only one, it is right or refused."""
    optimizer = optimizer_of(lambda p, g, s, c: [torch.addcmul(p, g, g, value=c.a).sqrt()], 0)
    right = program_of(optimizer).variant
    monkeypatch.setattr(program, "_FOUND", [Variant(fused, library)])
    monkeypatch.setattr(kernel, "_PROGRAMS", {})
    assert program_of(optimizer).variant == right
    monkeypatch.setattr(program, "_variants", lambda: [Variant(fused, library)])
    monkeypatch.setattr(kernel, "_PROGRAMS", {})
    said = explained(optimizer, noise(0, 300))
    assert said.startswith("exact" if right == Variant(fused, library) else "blocked")


def program_of(optimizer: Optimizer) -> Any:
    assert explained(optimizer, noise(0, 300)).startswith("exact")
    return list(kernel._PROGRAMS.values())[-1].program  # type: ignore[union-attr]


def root_of_root(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    """At zeros, which the library is not given."""
    return [g.sqrt().sqrt() + p]


def root_kept(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    """What the root is of is overwritten before the root is read again."""
    root = s[0].sqrt()
    return [p - c.a * root / (g.abs() + 1.0).sqrt(), s[0] * c.a + g * g, root]


def root_of_what_is_exchanged(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [s[1].abs().sqrt(), s[1] + p.sqrt(), s[0]]


def root_alone(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    """Of an argument that nothing else reads."""
    return [g.sqrt()]


def is_infinite(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    """A double beyond the floats is finite."""
    return [g.isinf().to(p.dtype)]


def through_whole_numbers(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    """A whole number has no negative zero, and is no NaN."""
    return [g.clamp(-9, 9).int().to(p.dtype)]


def fills_with_a_flag(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    return [p.masked_fill(g > 0, False)]


def whole_and_a_fraction(p: Tensor, g: Tensor, s: Any, c: Numbers) -> list[Tensor]:
    whole = torch.where(g.isnan(), 0.0, g).clamp(-9, 9).int()
    return [p * (whole < 1.5), s[0] * ((g > 0) == 2)]


FOUND = [
    (root_of_root, 0),
    (root_kept, 2),
    (root_of_what_is_exchanged, 2),
    (root_alone, 0),
    (is_infinite, 0),
    (through_whole_numbers, 0),
    (fills_with_a_flag, 0),
    (whole_and_a_fraction, 1),
]
"""What loops once did otherwise than torch, or could not do."""


@pytest.mark.parametrize(("function", "states"), FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_found(function: Any, states: int, dtype: torch.dtype) -> None:
    optimizer = optimizer_of(function, states)
    assert explained(optimizer, torch.ones(300, dtype=dtype)).startswith("exact")
    for style in ("plain", "wide", "special"):
        p, g, *kept = (drawn(k, 1_031, dtype, style=style) for k in range(2 + states))
        state = optimizer.init(p)
        for old, new in zip(state.leaves.stages[0].kept, kept, strict=True):
            old.copy_(new)
        got, want = (
            optimizer.using(executor=one).update(p, g, state) for one in ("compile", "reference")
        )
        assert_equal(got, want)


def test_totals_are_a_loop_s_numbers() -> None:
    optimizer = chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9))
    assert explained(optimizer, tree(0)["z"]).startswith("exact")
    for executor in ("compile", "auto"):
        assert_steps_are_equal(optimizer, tree(0), gradients, executor=executor)


def test_a_new_number_compiles_nothing() -> None:
    optimizer = adamw()
    assert explained(optimizer, noise(0, 300)).startswith("exact")
    before = dict(kernel._PROGRAMS)
    for lr in (0.0, 1e-3, torch.tensor(0.1), lambda made: 0.1 / (made + 1)):
        other = optimizer.replace(lr=lr, eps=1e-3, betas=(0.5, 0.75))
        for sizes in ((2,), (3, 5), (70_001,)):
            params = {str(k): noise(k, size) for k, size in enumerate(sizes)}
            assert_steps_are_equal(
                other,
                params,
                lambda step, given=params: {k: noise(step, len(p)) for k, p in given.items()},
            )
    assert {key for key in kernel._PROGRAMS if key not in before} == set()


@pytest.mark.parametrize(
    "optimizer",
    [adamw(lr=0.1), chain(clip_by_global_norm(1.0), sgd(lr=0.1))],
    ids=["adamw", "clip"],
)
def test_a_default_device_is_none_of_a_loop_s(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written, and held against torch, on the CPU."""
    monkeypatch.setattr(kernel, "_PROGRAMS", {})
    monkeypatch.setattr(program.Verdict, "read", lambda _: None)
    param, grad = noise(0, 5000), noise(1, 5000)
    want, _ = optimizer.update(param, grad, optimizer.init(param))
    state = optimizer.init(param)
    with torch.device("meta"):
        optimizer.using(executor="auto").update_(param, grad, state)
    assert [type(one) for one in kernel._PROGRAMS.values()] == [kernel._Found]
    assert torch.equal(param, want)
