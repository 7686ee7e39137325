"""Conventions in which implementations of Muon differ, as our options."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, PolarFactor, TorchOptimizer, muon, normuon
from tests.agreement.matrix_runs import POLARS, drawn, run
from tests.choices import case, pairs


def keller_polar(update: Tensor) -> Tensor:
    """Return the polar factor by Jordan et al. 2024, as Keller Jordan's program computes it."""
    x = update.bfloat16()
    is_tall = x.size(0) > x.size(1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def keller(param: Tensor, grads: list[Tensor], lr: float = 0.02) -> Tensor:
    """Return the parameter after steps of Keller Jordan's program, with momentum 0.95."""
    buffer = torch.zeros_like(param)
    for grad in grads:
        buffer = buffer.lerp(grad, 1 - 0.95)
        x = keller_polar(grad.lerp(buffer, 0.95))
        param = param.add(x * max(1, param.size(0) / param.size(1)) ** 0.5, alpha=-lr)
    return param


def test_muon_with_kellers_conventions_is_kellers_bit_for_bit() -> None:
    """Muon with Keller Jordan's conventions equals his program in every bit.

    torch's Muon differs from his by the rounding of products, and in the factor for tall matrices.
    """
    kellers: dict[str, Any] = {"adjust_lr_fn": "keller", "normalization": "add"}
    for shape in ((24, 24), (16, 40), (40, 16)):
        for dtype in (torch.float32, torch.float64):
            start = drawn(0, *shape).to(dtype)
            grads = [drawn(k + 1, *shape).to(dtype) for k in range(5)]
            want = keller(start, grads)
            ours, _ = run(muon(0.02, 0.0, **kellers, fused_products=False), start, grads)
            torchs, _ = run(muon(0.02, 0.0), start, grads)
            fused, _ = run(muon(0.02, 0.0, **kellers), start, grads)
            outside, _ = run(
                muon(0.02, 0.0, normalization="add", fused_products=True), start, grads
            )
            with case(shape=shape, dtype=dtype):
                assert torch.equal(ours, want)
                assert 1e-5 < float((torchs - want).abs().max()) < 2e-2
                assert torch.equal(outside, torchs)
                assert torch.equal(fused, torchs) == (shape[0] <= shape[1])


def test_normuon_is_its_authors_program_up_to_the_rounding_of_float32() -> None:
    """NorMuon matches its authors' program up to float32 rounding.

    Both iterate in bfloat16.
    """
    for shape in ((24, 24), (16, 40), (40, 16)):
        param, grads = drawn(0, *shape).float(), [drawn(k + 1, *shape).float() for k in range(5)]
        ours, _ = run(normuon(0.02), param, grads)
        buffer, square = torch.zeros(shape), torch.zeros(shape[0], 1)
        for grad in grads:
            buffer = buffer.lerp(grad, 1 - 0.95)
            x = keller_polar(grad.lerp(buffer, 0.95)).float()
            before = x.norm()
            square = square.lerp((x * x).mean(-1, keepdim=True), 1 - 0.95)
            x = x * (1 / (square.sqrt() + 1e-10))
            x = x * (before / (x.norm() + 1e-10)) * max(1, shape[0] / shape[1]) ** 0.5
            param = param.add(x, alpha=-0.02)
        with case(shape=shape):
            torch.testing.assert_close(ours, param, rtol=1e-6, atol=1e-7)


def test_blocks_of_rows_are_stepped_as_parameters_of_their_own() -> None:
    """Blocks of rows step like separate parameters.

    The blocks are heads of one size, Q, K and V of different sizes, stacked experts, and kernels.
    """

    def plain(**given: Any) -> Optimizer:
        return muon(0.1, **given).using(executor="reference")

    for one in pairs(
        iteration_dtype=["float32", "float64"],
        adjust_lr_fn=["original", "keller", "match_rms_adamw", "spectral"],
        polar=[POLARS["quintic"], POLARS["cans"]],
    ):
        grads = [drawn(k + 1, 12, 5) for k in range(3)]
        start = drawn(0, 12, 5)
        for option, sizes in (("row_blocks", [3] * 4), ("split_sizes", [6, 2, 4])):
            given = {option: len(sizes) if option == "row_blocks" else sizes}
            ours, _ = run(plain(**one, **given), start, grads)
            each = [
                run(plain(**one), own, list(of))[0]
                for own, *of in zip(*(one.split(sizes) for one in (start, *grads)), strict=True)
            ]
            with case(option=option, **one):
                torch.testing.assert_close(ours, torch.cat(each), rtol=1e-5, atol=1e-5)
        several, *those = (given.view(2, 2, 3, 5) for given in (start, *grads))
        stacked, _ = run(plain(**one, batch_axes=2), several, those)
        heads, _ = run(plain(**one, row_blocks=4), start, grads)
        flat = {"batch_axes": 1, "row_blocks": 2, "column_axes": 2}
        kernels, _ = run(
            plain(**one, **flat), start.view(2, 6, 5, 1), [g.view(2, 6, 5, 1) for g in grads]
        )
        with case(**one):
            torch.testing.assert_close(stacked.view(12, 5), heads, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(kernels.view(12, 5), heads, rtol=1e-12, atol=1e-12)


def test_blocks_and_stacks_run_by_every_executor() -> None:
    grads = [drawn(k + 1, 2, 6, 4) for k in range(2)]
    start = drawn(0, 2, 6, 4)
    options: dict[str, Any] = {"batch_axes": 1, "iteration_dtype": "float32"}
    for given in ({"row_blocks": 3}, {"split_sizes": (2, 1, 3)}, {"column_axes": 1}):
        optimizer = muon(0.1, **options, **given)
        want, _ = run(optimizer, start, grads)
        executors: Any = ("blocked", "auto")
        for executor in executors:
            made, _ = run(optimizer.using(executor=executor), start, grads)
            with case(executor=executor, **given):
                assert torch.equal(made, want)
        param = torch.nn.Parameter(start.clone())
        front = TorchOptimizer([param], optimizer)
        for grad in grads:
            param.grad = grad
            front.step()
        assert torch.equal(param.detach(), want)


def test_stacks_of_matrices_without_elements_are_stepped() -> None:
    for shape in ((2, 0, 3), (0, 4, 3), (2, 4, 0), (2, 2, 0, 3)):
        empty = torch.zeros(shape)
        for given in ({}, {"row_blocks": 2}, {"adjust_lr_fn": "spectral"}):
            with case(shape=shape, **given):
                made, _ = run(muon(0.1, batch_axes=len(shape) - 2, **given), empty, [empty])
                assert made.shape == shape


def test_what_the_options_of_muon_refuse() -> None:
    for given, shape, match in (
        ({"row_blocks": 3}, (4, 2), "row_blocks=3 must divide the 4 rows"),
        ({"split_sizes": (1, 2)}, (4, 2), r"split_sizes=\(1, 2\) must divide the 4 rows"),
        ({"batch_axes": 1}, (4, 2), "it must have 3 dimensions"),
        ({"column_axes": 3}, (4, 2), "it must have 4 dimensions"),
    ):
        with case(**given), pytest.raises(ValueError, match=match):
            muon(**given).init(torch.ones(shape))
    for given, match in (
        ({"row_blocks": 0}, "must be a whole number"),
        ({"split_sizes": (0, 2)}, "split_sizes must be whole numbers >= 1"),
        ({"split_sizes": (1.5,), "row_blocks": 2}, "row_blocks must be 1"),
        ({"normalization": "other"}, "normalization must be one of 'clamp'"),
        ({"adjust_lr_fn": "other", "polar": ()}, "adjust_lr_fn must be one of None, 'original'"),
        ({"polar": "1 2"}, 'must be a text of the form "a b c; a b c"'),
        ({"polar": [(1.0, math.inf, 0.0)]}, "must be 3 finite numbers"),
        ({"iteration_dtype": "int8"}, "iteration_dtype must be one of 'bfloat16'"),
        ({"ns_steps": 100, "normalization": "add"}, "ns_steps must be a whole number"),
    ):
        with case(**given), pytest.raises(ValueError, match=match):
            muon(**given)


def test_an_optimizer_shows_its_options_as_the_call_that_builds_it() -> None:
    for given in (
        {"polar": PolarFactor.polar_express(2)},
        {"split_sizes": (1, 2), "adjust_lr_fn": "keller"},
        {"iteration_dtype": "float32", "ns_steps": 2},
    ):
        optimizer = muon(**given)
        assert repr(eval(repr(optimizer), {"muon": muon})) == repr(optimizer)
        assert muon(**given) == optimizer
