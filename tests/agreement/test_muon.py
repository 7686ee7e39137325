"""Algorithms with orthogonal matrices: formulas in float64, and identities from theory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    PolarFactor,
    dion,
    muon,
    normuon,
    scion,
)
from functional_optim.algorithms.polar import iterate
from tests.agreement import formulas_muon as formulas
from tests.agreement.matrix_runs import POLARS, drawn, run
from tests.choices import case, pairs

SHAPES = ((4, 4), (3, 7), (7, 3))


def assert_formula(
    optimizer: Optimizer, formula: Callable[..., Any], shapes: Any = SHAPES, **named: Any
) -> None:
    """Make sure that parameters and momentum match a formula over 20 steps, up to rounding."""
    for shape in shapes:
        start, grads = drawn(0, *shape), [drawn(k + 1, *shape) for k in range(20)]
        param, state = run(optimizer, start, grads)
        want, momentum = formula(start.tolist(), [one.tolist() for one in grads])
        with case(shape=shape, **named):
            exact = torch.tensor(want, dtype=torch.float64)
            torch.testing.assert_close(param, exact, rtol=1e-9, atol=1e-9)
            exact = torch.tensor(momentum, dtype=torch.float64)
            torch.testing.assert_close(state.momentum_buffer, exact, rtol=1e-10, atol=1e-10)


def test_muon_is_its_formula_with_each_scale_and_polar_factor() -> None:
    scales: dict[str, Callable[[int, int], float]] = {
        "original": lambda m, n: math.sqrt(max(1.0, m / n)),
        "keller": lambda m, n: math.sqrt(max(1.0, m / n)),
        "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
        "spectral": lambda m, n: math.sqrt(m / n),
        "max_side": lambda m, n: math.sqrt(max(m, n)),
        "unscaled": lambda m, n: 1.0,
    }
    options = pairs(
        adjust_lr_fn=list(scales), polar=list(POLARS), nesterov=[True, False], fused=[True, False]
    )
    for turn, one in enumerate(options):
        polar = POLARS[one["polar"]]
        optimizer = muon(
            0.1,
            0.01,
            nesterov=one["nesterov"],
            adjust_lr_fn=one["adjust_lr_fn"],
            polar=polar,
            iteration_dtype="float64",
            normalization="add",
            fused_products=one["fused"],
        )

        def formula(p: Any, grads: Any, one: Any = one, polar: Any = polar) -> Any:
            return formulas.muon_formula(
                p,
                grads,
                scale=scales[one["adjust_lr_fn"]],
                nesterov=one["nesterov"],
                polynomials=polar.polynomials,
            )

        shape = SHAPES[turn % len(SHAPES)]
        assert_formula(optimizer, formula, [shape], **one)


def test_normuon_is_its_formula() -> None:
    """NorMuon matches the formula of the paper, and by default that of the authors' program."""
    options: dict[bool, dict[str, Any]] = {
        True: {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        False: {},
    }
    for paper, own in options.items():
        optimizer = normuon(0.1, 0.01, iteration_dtype="float64", **own)
        assert_formula(
            optimizer,
            lambda p, grads, paper=paper: formulas.normuon_formula(p, grads, paper=paper),
            paper=paper,
        )


def test_scion_is_its_formula() -> None:
    for one in pairs(
        kind=["spectral", "sign", "row_norm", "col_norm"], unconstrained=[False, True]
    ):
        optimizer = scion(
            0.1,
            norm=one["kind"],
            scale=3.0,
            unconstrained=one["unconstrained"],
            iteration_dtype="parameter",
        )
        assert_formula(
            optimizer, lambda p, grads, one=one: formulas.scion_formula(p, grads, **one), **one
        )


def test_dion_is_its_formula() -> None:
    for rank in (1, 2, 3):
        assert_formula(
            dion(0.1, 0.01, rank=rank),
            lambda p, grads, rank=rank: formulas.dion_formula(p, grads, rank=rank),
            rank=rank,
        )


# ------------------------------------------------------------------------------------ identities


def test_the_polar_factor_is_approached_within_the_bound_of_the_polynomials() -> None:
    """Polynomials bring singular values from 0.01 to 1 within their bounds, which are tight.

    Singular vectors do not change.
    """
    bounds = {
        "quintic": (0.68, 1.14),
        "tuned_quintic": (0.97, 1.04),
        "polar_express": (0.87, 1.13),
        "cans": (1 - 2e-5, 1 + 2e-5),
        "deepseek": (1 - 1e-9, 1.0006),
    }
    assert bounds.keys() == POLARS.keys()
    for name, (low, high) in bounds.items():
        polar = POLARS[name]
        values = [polar(0.01 + 0.99 * k / 5000) for k in range(5001)]
        with case(name=name):
            assert low <= min(values) <= max(values) <= high
            assert min(values) < low + 0.02  # the bound is tight
            assert max(values) > high - 0.02
        given = 0.01 ** (torch.arange(4, dtype=torch.float64) / 3)
        left, right = (torch.linalg.qr(drawn(seed, 4, 4))[0] for seed in (0, 1))
        made = iterate(left @ given.diag() @ right, list(polar.polynomials), False, True)
        want = torch.tensor([polar(float(one)) for one in given], dtype=torch.float64)
        with case(name=name, matrix=True):
            torch.testing.assert_close(made, left @ want.diag() @ right, rtol=1e-10, atol=1e-10)
            cubic = all(c == 0.0 for _, _, c in polar.polynomials)
            assert cubic == (name == "cans")
            saved = iterate(left @ given.diag() @ right, list(polar.polynomials), cubic, False)
            torch.testing.assert_close(saved, made, rtol=1e-10, atol=1e-10)


def test_cans_has_the_published_numbers() -> None:
    """CANS gives the nine polynomials that Grishina et al. 2025 publish for the bound 0.00085."""
    published = [
        (5.182503604966906, -5.178098480082684),
        (2.586120737395915, -0.6479542005271643),
        (2.567364126726186, -0.6454968804392178),
        (2.520560084348265, -0.6393528082067044),
        (2.410759275435182, -0.6248683598710716),
        (2.1883348130094173, -0.5952022073798908),
        (1.8595760874873613, -0.5504490972723968),
        (1.589020160467417, -0.5126569802066718),
        (1.5051653981684994, -0.5007377068751799),
    ]
    for ours, (a, b) in zip(PolarFactor.cans(9).polynomials, published, strict=True):
        assert ours == (pytest.approx(a, rel=1e-13), pytest.approx(b, rel=1e-13), 0.0)


def test_scion_steps_vectors_by_their_root_mean_square() -> None:
    grads = [drawn(k + 1, 5) for k in range(2)]
    param, _ = run(scion(0.5, 0.9, "rms", 2.0, unconstrained=True), torch.zeros(5).double(), grads)
    m = [0.1 * grads[0], 0.09 * grads[0] + 0.1 * grads[1]]
    want = -sum(one / one.square().mean().sqrt() for one in m)
    torch.testing.assert_close(param, want, rtol=1e-6, atol=1e-6)
    for norm, bad in (("rms", torch.ones(2, 2)), ("sign", torch.ones(2))):
        with case(norm=norm), pytest.raises(ValueError, match=r"dimensions?, got a parameter of"):
            scion(norm=norm).init(bad)


def test_dions_first_basis_is_orthonormal() -> None:
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        state = dion(rank=8).init(torch.zeros(8, 500, dtype=dtype))
        basis = state.leaves.stages[-1].right_basis
        assert basis.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        assert float((basis.mT @ basis - torch.eye(8, dtype=basis.dtype)).abs().max()) < bound
