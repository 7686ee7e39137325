"""NorMuon: Muon with one adaptive step size for each row; Li et al. 2025, algorithm 1.

    M_t = mu * M_{t-1} + (1 - mu) * G_t
    U_t = M_t, or with Nesterov momentum (1 - mu) * G_t + mu * M_t
    O_t = polar(U_t)                                       (Newton-Schulz)
    v_t = b2 * v_{t-1} + (1 - b2) * mean_j (O_t)_ij^2      (one number per row, v_0 = 0)
    N_t = O_t / (sqrt(v_t) + eps)
    p_t = (1 - lr * lambda) * p_{t-1} - lr * r * N_t / (|N_t|_F + eps)

The norm of N_t is replaced by r. For a matrix of A rows and B columns, the authors' program has
r = |O_t|_F * sqrt(max(1, A / B)), the norm of a step of Muon, and Nesterov momentum. The paper has
r = 0.2 * sqrt(A * B), for AdamW's learning rates, and no Nesterov momentum. Defaults are those of
the authors' program (zichongli5/NorMuon), which others follow.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.polar import (
    ITERATION_DTYPES,
    PolarFactor,
    are_cubic,
    encode_polar,
    orthogonalize,
    polar_flops,
    polynomials_of,
)
from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, check_choice
from functional_optim.core.matrices import norms, require_matrix
from functional_optim.numeric import add, lerp, mul, shift
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class NormuonState(NamedTuple):
    momentum_buffer: Tensor  # M, of the parameter's shape and dtype
    second_momentum_buffer: Tensor  # v, (rows, 1), float32 or float64


class NormuonHyper(NamedTuple):
    lr: float  # learning rate
    momentum: float  # mu
    beta2: float  # b2
    nesterov: bool
    eps: float  # added to roots and norms
    adjust_lr_fn: str | None  # "original" (or None) or "match_rms_adamw": r
    polar: str | None  # the polynomials, as the text of a PolarFactor
    iteration_dtype: str | None  # one of ITERATION_DTYPES


class NormuonCoefficients(NamedTuple):
    weight: float  # 1 - mu
    momentum: float  # mu
    weight_2: float  # 1 - b2
    nesterov: bool
    eps: float
    lr: float
    match_rms_adamw: bool
    polynomials: list[tuple[float, float, float]]
    cubic: bool  # True if all polynomials are of degree 3
    dtype: str  # one of ITERATION_DTYPES


def normuon_init(param: Tensor, hyper: NormuonHyper) -> NormuonState:
    require_matrix("normuon", param)
    rows = widen(torch.zeros_like(param)).new_zeros(param.size(0), 1)
    return NormuonState(torch.zeros_like(param), rows)


def normuon_flops(shape: tuple[int, ...], hyper: NormuonHyper) -> int:
    return polar_flops(shape[0], shape[1], hyper.polar)


def normuon_check(hyper: NormuonHyper) -> None:
    allowed = (None, "original", "match_rms_adamw")
    check_choice("normuon", "adjust_lr_fn", hyper.adjust_lr_fn, allowed)
    check_choice("normuon", "iteration_dtype", hyper.iteration_dtype, ITERATION_DTYPES)
    PolarFactor.parse(hyper.polar or "")


def normuon_coefficients(step: float, hyper: NormuonHyper) -> NormuonCoefficients:
    name, dtype = hyper.adjust_lr_fn, hyper.iteration_dtype
    polynomials = polynomials_of(hyper.polar)
    return NormuonCoefficients(
        1 - hyper.momentum,
        hyper.momentum,
        1 - hyper.beta2,
        hyper.nesterov,
        hyper.eps,
        hyper.lr,
        name is not None and name == "match_rms_adamw",
        polynomials,
        are_cubic(polynomials),
        "bfloat16" if dtype is None else dtype,
    )


def normuon_rule(
    param: Tensor, grad: Tensor, state: NormuonState, c: NormuonCoefficients
) -> tuple[Tensor, NormuonState]:
    buffer = lerp(state.momentum_buffer, grad, c.weight)
    update = lerp(grad, buffer, c.momentum) if c.nesterov else buffer
    orthogonal = orthogonalize(update, c.polynomials, c.cubic, 1e-7, c.dtype, "add", False)
    factor = orthogonal.to(state.second_momentum_buffer.dtype)
    rows, columns = param.size(-2), param.size(-1)
    mean = (factor * factor).sum(-1, keepdim=True) / max(1, columns)
    square = lerp(state.second_momentum_buffer, mean, c.weight_2)
    normed = factor / shift(square.sqrt(), c.eps)
    scaled = normed / shift(norms(normed), c.eps)
    if c.match_rms_adamw:
        step = mul(scaled, 0.2 * math.sqrt(rows * columns))
    else:
        step = mul(scaled * norms(factor), math.sqrt(max(1.0, rows / max(1, columns))))
    return add(param, step, -c.lr).to(param.dtype), NormuonState(buffer, square)


NORMUON = Rule(
    name="normuon",
    hyper=NormuonHyper,
    state=NormuonState,
    init=normuon_init,
    state_depends_on=(),
    coefficients=normuon_coefficients,
    rule=normuon_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("momentum", BELOW_ONE),
        ("beta2", BELOW_ONE),
        ("eps", NON_NEGATIVE),
    ),
    check=normuon_check,
    kind="per_matrix",
    flops=normuon_flops,
    stacked=True,
)


@constructor
def normuon(
    lr: Scalar = 0.02,
    weight_decay: Scalar = 0.0,
    momentum: Scalar = 0.95,
    beta2: Scalar = 0.95,
    nesterov: bool = True,
    eps: Scalar = 1e-10,
    adjust_lr_fn: str | None = None,
    *,
    polar: PolarFactor | Sequence[Sequence[float]] | str | None = None,
    iteration_dtype: str | None = None,
    maximize: bool = False,
) -> Optimizer:
    """NorMuon: Muon whose rows are divided by the roots of their average squares.

    ``p = (1 - lr * weight_decay) * p - lr * r * N / |N|``, where ``N = O / (sqrt(v) + eps)``, ``O``
    is the orthogonal matrix of Muon's step, and ``v`` averages the mean square of each row of
    ``O``. State: ``1 + 1 / columns`` numbers per parameter. Cost: that of Muon, three products of
    matrices per iteration.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        weight_decay: coefficient of the decoupled decay, >= 0.
        momentum: decay of the average of gradients, in [0, 1).
        beta2: decay of the average of squares, in [0, 1).
        nesterov: orthogonalize ``(1 - momentum) * g + momentum * m``. The paper has False.
        eps: added to roots and norms, >= 0.
        adjust_lr_fn: "original" (or None): ``r = |O| * sqrt(max(1, rows / columns))``, the norm of
            a step of Muon, as in the authors' program; or "match_rms_adamw": ``r = 0.2 *
            sqrt(rows * columns)``, for AdamW's learning rates, as in the paper.
        polar: the polynomial of each iteration, a :class:`~functional_optim.PolarFactor`; None for
            five iterations with Muon's polynomial.
        iteration_dtype: dtype of the iteration: "bfloat16" (or None), "float16", "float32",
            "float64", or "parameter" for the dtype of the momentum.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. It needs whole tensors (``kind="per_matrix"``), and
        they are real matrices: its ``init`` raises ValueError for a parameter of another number of
        dimensions. torch has no such class.

    Example::

        >>> import torch
        >>> optimizer = normuon(lr=0.5, adjust_lr_fn="match_rms_adamw")
        >>> weight, grad = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, -1.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight.round(decimals=2)
        tensor([[-0.1400,  0.0000],
                [ 0.0000,  0.1400]])

    Reference:
        Li et al., "NorMuon: making Muon more efficient and scalable", arXiv 2510.05491, 2025,
        algorithm 1.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        NORMUON(
            lr=lr,
            momentum=momentum,
            beta2=beta2,
            nesterov=nesterov,
            eps=eps,
            adjust_lr_fn=adjust_lr_fn,
            polar=encode_polar(polar),
            iteration_dtype=iteration_dtype or "bfloat16",
        ),
    )
