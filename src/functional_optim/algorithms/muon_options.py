"""Muon with the conventions in which its implementations differ.

    m_t = mu * m_{t-1} + (1 - mu) * g_t
    u_t = m_t, or with Nesterov momentum (1 - mu) * g_t + mu * m_t
    p_t = (1 - lr * lambda) * p_{t-1} - lr * r(shape) * polar(u_t)

``polar`` is the approximate polar factor of :mod:`functional_optim.algorithms.polar`. Each block of
rows, and each matrix of a stack, has its own polar factor and factor ``r``, like a parameter.
``muon`` selects this rule if an option is set that torch.optim.Muon does not have.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.polar import (
    ITERATION_DTYPES,
    NORMALIZATIONS,
    SCALES,
    PolarFactor,
    are_cubic,
    orthogonalize,
    polar_flops,
    polynomials_of,
    scale_of,
)
from functional_optim.bounds import ANY, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval, check_choice
from functional_optim.core.aliasing import match_strides
from functional_optim.core.blocks import BlockOptions, MatrixBlocks
from functional_optim.core.scalars import product_in, scalar_dtype
from functional_optim.core.stage import Rule
from functional_optim.numeric import add, lerp, mul


class MuonOptionsState(NamedTuple):
    momentum_buffer: Tensor  # m, of the parameter's shape and dtype


class MuonOptionsHyper(NamedTuple):
    lr: float  # learning rate
    weight_decay: float  # lambda
    momentum: float  # mu
    nesterov: bool
    eps: float  # least divisor, or number that is added to the norm
    adjust_lr_fn: str | None  # one of SCALES, or None for "original": r
    polar: str | None  # the polynomials, as the text of a PolarFactor
    iteration_dtype: str | None  # one of ITERATION_DTYPES
    normalization: str | None  # one of NORMALIZATIONS
    fused_products: bool  # True if a product and its sum are rounded once
    row_blocks: int  # number of equal blocks of rows
    split_sizes: str | None  # rows of each block, "512,128,128"; "" without
    batch_axes: int  # number of leading axes, over which matrices are stacked
    column_axes: int  # number of last axes that make up the columns


class MuonOptionsCoefficients(NamedTuple):
    decay: float  # 1 - lr * lambda
    weight: float  # 1 - mu
    momentum: float  # mu
    nesterov: bool
    eps: float
    lr: float
    lr_dtype: str  # dtype of a tensor lr, in which it is multiplied by r; else "float64"
    scale: str  # one of SCALES
    polynomials: list[tuple[float, float, float]]
    cubic: bool  # True if all polynomials are of degree 3
    dtype: str  # one of ITERATION_DTYPES
    normalization: str  # one of NORMALIZATIONS
    fused: bool
    row_blocks: int
    split_sizes: list[int]  # [] without
    column_axes: int


def encode_sizes(sizes: Sequence[int] | str | None) -> str:
    """Return the rows of each block as text, such as "512,128,128"."""
    given = sizes.split(",") if isinstance(sizes, str) and sizes else sizes or ()
    try:
        found = list(map(int, given))
    except (TypeError, ValueError):
        found = [0]
    if any(one < 1 for one in found):
        raise ValueError(f"muon: split_sizes must be whole numbers >= 1, got {sizes!r}")
    return ",".join(map(str, found))


def decode_sizes(text: str | None) -> list[int]:
    """Return the numbers of a text such as "512,128,128"."""
    if text is not None and len(text) > 0:
        return [int(one) for one in text.split(",")]
    found: list[int] = []
    return found


def muon_options_blocks(hyper: MuonOptionsHyper) -> MatrixBlocks:
    sizes = tuple(decode_sizes(hyper.split_sizes))
    return MatrixBlocks(hyper.row_blocks, sizes, hyper.batch_axes, hyper.column_axes)


def muon_options_unsplit(hyper: MuonOptionsHyper) -> MuonOptionsHyper:
    return hyper._replace(row_blocks=1, split_sizes="", batch_axes=0)


def muon_options_flops(shape: tuple[int, ...], hyper: MuonOptionsHyper) -> int:
    return polar_flops(shape[0], math.prod(shape[1:]), hyper.polar)


def muon_options_init(param: Tensor, hyper: MuonOptionsHyper) -> MuonOptionsState:
    blocks = muon_options_blocks(hyper)
    wanted = hyper.batch_axes + 1 + hyper.column_axes
    if param.dim() != wanted or param.is_complex():
        raise ValueError(
            f"muon steps real matrices, which have 2 dimensions, got a parameter of shape "
            f"{tuple(param.shape)} (a complex one counts by its real view); with "
            f"batch_axes={hyper.batch_axes} and column_axes={hyper.column_axes} it must have "
            f"{wanted} dimensions; change them, or partition the parameters, and step this one by "
            "another optimizer, such as adamw"
        )
    blocks.check("muon", param.shape)
    return MuonOptionsState(torch.zeros_like(param))


def muon_options_check(hyper: MuonOptionsHyper) -> None:
    check_choice("muon", "adjust_lr_fn", hyper.adjust_lr_fn, (None, *SCALES))
    check_choice("muon", "iteration_dtype", hyper.iteration_dtype, ITERATION_DTYPES)
    check_choice("muon", "normalization", hyper.normalization, NORMALIZATIONS)
    PolarFactor.parse(hyper.polar or "")
    if hyper.split_sizes and hyper.row_blocks != 1:
        raise ValueError("muon: row_blocks must be 1 if split_sizes are given")


def muon_options_coefficients(step: float, hyper: MuonOptionsHyper) -> MuonOptionsCoefficients:
    scale, dtype, normalization = hyper.adjust_lr_fn, hyper.iteration_dtype, hyper.normalization
    polynomials = polynomials_of(hyper.polar)
    return MuonOptionsCoefficients(
        1 - hyper.lr * hyper.weight_decay,
        1 - hyper.momentum,
        hyper.momentum,
        hyper.nesterov,
        hyper.eps,
        hyper.lr,
        scalar_dtype(hyper.lr),
        "original" if scale is None else scale,
        polynomials,
        are_cubic(polynomials),
        "bfloat16" if dtype is None else dtype,
        "clamp" if normalization is None else normalization,
        hyper.fused_products,
        hyper.row_blocks,
        decode_sizes(hyper.split_sizes),
        hyper.column_axes,
    )


def step_block(param: Tensor, update: Tensor, c: MuonOptionsCoefficients) -> Tensor:
    """Step blocks of rows that each have a polar factor."""
    rows, columns = update.size(-2), update.size(-1)
    flat = update.flatten(0, -3) if update.dim() > 3 else update
    factor = orthogonalize(flat, c.polynomials, c.cubic, c.eps, c.dtype, c.normalization, c.fused)
    ratio = scale_of(rows, columns, c.scale)
    if c.scale == "keller":
        factor, ratio = mul(factor, ratio), 1.0
    shrunk = match_strides(mul(param, c.decay), param)
    step = factor.reshape(update.shape)
    return add(shrunk, step, -product_in(c.lr, ratio, c.lr_dtype)).to(param.dtype)


def muon_options_rule(
    param: Tensor, grad: Tensor, state: MuonOptionsState, c: MuonOptionsCoefficients
) -> tuple[Tensor, MuonOptionsState]:
    buffer = lerp(state.momentum_buffer, grad, c.weight)
    update = lerp(grad, buffer, c.momentum) if c.nesterov else buffer
    matrix, direction = param, update
    if c.column_axes > 1:
        matrix, direction = matrix.flatten(-c.column_axes), direction.flatten(-c.column_axes)
    if len(c.split_sizes) > 0:
        pieces = matrix.split(c.split_sizes, dim=-2)
        directions = direction.split(c.split_sizes, dim=-2)
        blocks = [step_block(pieces[i], directions[i], c) for i in range(len(c.split_sizes))]
        new = torch.cat(blocks, dim=-2)
    elif c.row_blocks > 1:
        block = [c.row_blocks, matrix.size(-2) // c.row_blocks]
        new = step_block(matrix.unflatten(-2, block), direction.unflatten(-2, block), c)
    else:
        new = step_block(matrix, direction, c)
    return new.reshape(param.shape), MuonOptionsState(buffer)


MUON_OPTIONS = Rule(
    name="muon_options",
    hyper=MuonOptionsHyper,
    state=MuonOptionsState,
    init=muon_options_init,
    state_depends_on=("batch_axes", "column_axes", "row_blocks", "split_sizes"),
    coefficients=muon_options_coefficients,
    rule=muon_options_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("weight_decay", NON_NEGATIVE),
        ("momentum", NON_NEGATIVE),
        ("eps", ANY),
        ("row_blocks", Interval(low=1)),
        ("batch_axes", Interval(low=0)),
        ("column_axes", Interval(low=1)),
    ),
    check=muon_options_check,
    kind="per_matrix",
    flops=muon_options_flops,
    stacked=True,
    blocks=BlockOptions(muon_options_blocks, muon_options_unsplit),
    as_gradient=("momentum_buffer",),
)
