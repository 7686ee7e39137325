"""Chains as loops: supported chains, refused chains, and the detection of wrong loops."""

from typing import Any

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.kernels.exact import kernel, program
from functional_optim.kernels.exact.formulas import FORMULAS
from functional_optim.kernels.exact.phases import Variant
from functional_optim.kernels.passes import passes_of
from tests.cases import ONE_CHAIN

from ...choices import EVERYTHING, case, pairs
from ..rules import RULES, VARIANTS
from ..support import noise
from .support import (
    Numbers,
    assert_equal,
    assert_steps_are_equal,
    drawn,
    explained,
    optimizer_of,
)

NO_FORMULA = frozenset({"library", "powers"})
"""Rules that call a function without a formula."""
SIZES = {"w": (3, 4), "s": (), "e": (0, 2), "z": (5_001,)}


def tree(seed: int) -> dict[str, Any]:
    return {key: noise(seed + k, *size) for k, (key, size) in enumerate(SIZES.items())}


def gradients(step: int) -> dict[str, Any]:
    return tree(100 * (step + 1))


def test_every_rule_and_every_algorithm_has_a_loop() -> None:
    """Every chain has a loop, unless it needs its whole tensor or keeps a scalar per parameter."""
    table = {name: one.factory() for name, one in ONE_CHAIN.items()}
    whole = [
        name
        for name, one in table.items()
        if why_not_pointwise(one.stages) and passes_of(one.stages) is None
    ]
    assert not {"lamb", "lars"} & {*whole}
    whole += ["asgd", "nadam"]  # they keep a scalar per parameter
    for place, (name, optimizer) in enumerate({**RULES, **VARIANTS, **table}.items()):
        dtypes = (torch.float32, torch.float64)
        if not (EVERYTHING and name in table):  # else the next chain has the other dtype
            dtypes = (dtypes[place % 2 if name in table else 0],)
        for dtype in dtypes:
            said = explained(optimizer, torch.ones(300, dtype=dtype))
            with case(name=name, dtype=dtype):
                kernel = "one by one" if name in whole else "exact"
                assert said.startswith("blocked" if name in NO_FORMULA else kernel), said


REFUSED: dict[str, Any] = {
    "rsqrt has no formula that is torch's to the bit": lambda p, g, s, c: [
        p - c.c * g.abs().add(1.0).rsqrt()
    ],
    "lerp with a weight per element has no formula": lambda p, g, s, c: [
        torch.lerp(p, g, g.abs().clamp(max=1.0))
    ],
    "roots in two precisions": lambda p, g, s, c: [
        p.abs().sqrt() + g.double().abs().sqrt().to(p.dtype)
    ],
}


def test_what_has_no_one_result_is_blocked_and_why_is_said() -> None:
    for reason, function in REFUSED.items():
        optimizer = optimizer_of(function, 0)
        for executor in ("compiled", "auto"):
            with case(reason=reason, executor=executor):
                said = explained(optimizer, noise(0, 5_001), executor)
                assert said.startswith("blocked; ") and reason in said
                assert_steps_are_equal(optimizer, tree(0), gradients, executor=executor)


WRONG: dict[str, tuple[Any, Any]] = {
    "div": (
        lambda at, x, y: f"{at(x)} * (({at(x)} * 0 + 1) / {at(y)})",
        lambda p, g, s, c: [p / g],
    ),
    "sign": (lambda at, x: f"{at(x)} > 0 ? 1 : -1", lambda p, g, s, c: [g.sign()]),
    "lerp": (
        lambda at, x, y, w: f"{at(x)} + {at(w)} * ({at(y)} - {at(x)})",
        lambda p, g, s, c: [torch.lerp(p, g, c.c)],
    ),
    "maximum": (
        lambda at, x, y: f"{at(x)} > {at(y)} ? {at(x)} : {at(y)}",
        lambda p, g, s, c: [torch.maximum(p, g)],
    ),
    "addcdiv": (
        lambda at, x, a, b, value: f"mad({at(value)}, {at(a)} / {at(b)}, {at(x)})",
        lambda p, g, s, c: [torch.addcdiv(p, g, p, value=c.a)],
    ),
    "isfinite": (lambda at, x: f"{at(x)} == {at(x)}", lambda p, g, s, c: [p * g.isfinite()]),
}


def test_a_wrong_formula_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check detects wrong rounding, and wrong results for special numbers."""
    for name, (wrong, call) in WRONG.items():
        with case(name=name), monkeypatch.context() as patch:
            patch.setitem(FORMULAS, name, wrong)
            optimizer = optimizer_of(call, 0)
            said = explained(optimizer, noise(0, 5_001))
            assert said.startswith("blocked; no loop gives the bits of torch's operations")
            assert_steps_are_equal(optimizer, tree(0), gradients)


def test_of_the_variants_the_right_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check chooses the same variant in any order, and refuses the wrong variants."""
    optimizer = optimizer_of(lambda p, g, s, c: [torch.addcmul(p, g, g, value=c.a).sqrt()], 0)
    right = program_of(optimizer).variant
    for one in (Variant(fused, library) for fused in (True, False) for library in (True, False)):
        with case(variant=one), monkeypatch.context() as patch:
            patch.setattr(program, "_FOUND", [one])
            patch.setattr(kernel, "_PROGRAMS", Cache())
            assert program_of(optimizer).variant == right
            patch.setattr(program, "_variants", lambda one=one: [one])
            patch.setattr(kernel, "_PROGRAMS", Cache())
            said = explained(optimizer, noise(0, 300))
            assert said.startswith("exact" if right == one else "blocked")


def program_of(optimizer: Optimizer) -> Any:
    assert explained(optimizer, noise(0, 300)).startswith("exact")
    return list(kernel._PROGRAMS.values())[-1].program  # type: ignore[union-attr]


def root_kept(p: Any, g: Any, s: Any, c: Numbers) -> list[Any]:
    """Overwrite the argument of a root before the root is read again."""
    root = s[0].sqrt()
    return [p - c.a * root / (g.abs() + 1.0).sqrt(), s[0] * c.a + g * g, root]


def whole_and_a_fraction(p: Any, g: Any, s: Any, c: Numbers) -> list[Any]:
    whole = torch.where(g.isnan(), 0.0, g).clamp(-9, 9).int()
    return [p * (whole < 1.5), s[0] * ((g > 0) == 2)]


FOUND: list[tuple[Any, int]] = [
    (lambda p, g, s, c: [g.sqrt().sqrt() + p], 0),  # the library does not get zeros
    (root_kept, 2),
    (lambda p, g, s, c: [s[1].abs().sqrt(), s[1] + p.sqrt(), s[0]], 2),  # exchanged states
    (lambda p, g, s, c: [g.sqrt()], 0),  # nothing else reads the argument
    (lambda p, g, s, c: [g.isinf().to(p.dtype)], 0),  # a double beyond float range is finite
    # An integer has no negative zero and no NaN.
    (lambda p, g, s, c: [g.clamp(-9, 9).int().to(p.dtype)], 0),
    (lambda p, g, s, c: [p.masked_fill(g > 0, False)], 0),
    (whole_and_a_fraction, 1),
]
"""Functions for which loops once failed or differed from torch, with their number of states."""


def test_what_was_found() -> None:
    for one in pairs(place=range(len(FOUND)), dtype=[torch.float32, torch.float64]):
        function, states = FOUND[one["place"]]
        optimizer, dtype = optimizer_of(function, states), one["dtype"]
        with case(**one):
            assert explained(optimizer, torch.ones(300, dtype=dtype)).startswith("exact")
            for style in ("plain", "wide", "special"):
                p, g, *kept = (drawn(k, 1_031, dtype, style=style) for k in range(2 + states))
                state = optimizer.init(p)
                for old, new in zip(state.leaves.stages[0].kept, kept, strict=True):
                    old.copy_(new)
                got, want = (
                    optimizer.using(executor=executor).update(p, g, state)
                    for executor in ("compiled", "reference")
                )
                assert_equal(got, want)


def test_a_new_number_compiles_nothing() -> None:
    """Steps with a new scalar, schedule, length, or total reuse a compiled loop."""
    clipped = chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9))
    for optimizer in (adamw(), clipped):
        assert explained(optimizer, noise(0, 300)).startswith("exact")
    before = {*kernel._PROGRAMS}
    for lr in (0.0, 1e-3, torch.tensor(0.1), lambda made: 0.1 / (made + 1)):
        other = adamw(lr=lr, eps=1e-3, betas=(0.5, 0.75))
        assert_steps_are_equal(other, tree(0), gradients)
        assert_steps_are_equal(clipped.replace(lr=lr), tree(0), gradients, executor="auto")
    assert {*kernel._PROGRAMS} == before


def test_a_default_device_is_none_of_a_loop_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are built and checked on the CPU, for any default device."""
    monkeypatch.setattr(program.Verdict, "read", lambda _: None)
    for optimizer in (adamw(lr=0.1), chain(clip_by_global_norm(1.0), sgd(lr=0.1))):
        monkeypatch.setattr(kernel, "_PROGRAMS", Cache())
        param, grad = noise(0, 5000), noise(1, 5000)
        want, _ = optimizer.using(executor="reference").update(param, grad, optimizer.init(param))
        state = optimizer.init(param)
        with torch.device("meta"):
            optimizer.using(executor="auto").update_(param, grad, state)
        assert [type(one) for one in kernel._PROGRAMS.values()] == [kernel._Found]
        assert torch.equal(param, want)
