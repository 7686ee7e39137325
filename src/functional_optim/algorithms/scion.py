"""Scion: steps of one size in a norm that is chosen for each layer; Pethick et al. 2025.

    m_t = mu * m_{t-1} + (1 - mu) * g_t                                  (m_0 = 0)
    p_t = (1 - lr) * p_{t-1} - lr * scale * d(m_t)         (algorithm 2, constrained)
    p_t =            p_{t-1} - lr * scale * d(m_t)         (algorithm 1, unconstrained)

``-d(m)`` is the matrix of unit norm with the smallest inner product with ``m``: a linear
minimization oracle. For a matrix of A rows (outputs) and B columns (inputs), ``d(m)`` is

    spectral   sqrt(A / B) * polar(m)                      (Newton-Schulz)
    sign       sign(m) / B
    row_norm   m_i / (sqrt(B) * |m_i|)                     for each row m_i
    col_norm   sqrt(A) * m_j / |m_j|                       for each column m_j
    rms        m / rms(m)                                  for a vector

The authors call ``1 - mu`` the momentum. Defaults are those of the authors' program
(LIONS-EPFL/scion), but for the momentum, which is that of its example: 0.1 in their words.
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
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, check_choice
from functional_optim.core.matrices import require_matrix
from functional_optim.numeric import add, lerp, mul, shift

NORMS = ("spectral", "sign", "row_norm", "col_norm", "rms")
"""Names of the norms; "rms" is that of vectors, and all others are of matrices."""


class ScionState(NamedTuple):
    momentum_buffer: Tensor  # m, of the parameter's shape and dtype


class ScionHyper(NamedTuple):
    lr: float  # learning rate
    momentum: float  # mu
    norm: str | None  # one of NORMS
    scale: float  # radius of the ball
    unconstrained: bool
    normalized: bool  # True if directions are scaled by the number of inputs
    polar: str | None  # the polynomials, as the text of a PolarFactor
    iteration_dtype: str | None  # one of ITERATION_DTYPES


class ScionCoefficients(NamedTuple):
    weight: float  # 1 - mu
    decay: float  # 1 - lr
    step_size: float  # -lr * scale
    unconstrained: bool
    norm: str  # one of NORMS
    normalized: bool
    polynomials: list[tuple[float, float, float]]
    cubic: bool  # True if all polynomials are of degree 3
    dtype: str  # one of ITERATION_DTYPES


def scion_init(param: Tensor, hyper: ScionHyper) -> ScionState:
    if hyper.norm != "rms":
        require_matrix("scion", param)
    elif param.dim() != 1:
        raise ValueError(
            "scion with norm='rms' steps real vectors, which have 1 dimension, got a parameter of "
            f"shape {tuple(param.shape)}; choose another norm for matrices, by a partition"
        )
    return ScionState(torch.zeros_like(param))


def scion_flops(shape: tuple[int, ...], hyper: ScionHyper) -> int:
    if hyper.norm in (None, "spectral"):
        return polar_flops(shape[0], shape[1], hyper.polar)
    return 4 * math.prod(shape)


def scion_check(hyper: ScionHyper) -> None:
    check_choice("scion", "norm", hyper.norm, NORMS)
    check_choice("scion", "iteration_dtype", hyper.iteration_dtype, ITERATION_DTYPES)
    PolarFactor.parse(hyper.polar or "")


def scion_coefficients(step: float, hyper: ScionHyper) -> ScionCoefficients:
    norm, dtype = hyper.norm, hyper.iteration_dtype
    polynomials = polynomials_of(hyper.polar)
    return ScionCoefficients(
        1 - hyper.momentum,
        1 - hyper.lr,
        -hyper.lr * hyper.scale,
        hyper.unconstrained,
        "spectral" if norm is None else norm,
        hyper.normalized,
        polynomials,
        are_cubic(polynomials),
        "bfloat16" if dtype is None else dtype,
    )


def scion_direction(m: Tensor, c: ScionCoefficients) -> Tensor:
    """Return the matrix of unit norm that is closest in direction to the momentum."""
    columns, eps = max(1, m.size(-1)), 1e-8
    if c.norm == "rms":
        mean = (m * m).sum(-1, keepdim=True) / columns
        return m / shift(mean.sqrt(), eps)
    rows = m.size(-2)
    if c.norm == "sign":
        return mul(m.sign(), 1.0 / columns if c.normalized else 1.0)
    if c.norm == "row_norm":
        norms = (m * m).sum(-1, keepdim=True).sqrt()
        return m / shift(mul(norms, math.sqrt(columns) if c.normalized else 1.0), eps)
    if c.norm == "col_norm":
        norms = (m * m).sum(-2, keepdim=True).sqrt()
        inputs = float(columns) if c.normalized else 1.0
        return m / shift(mul(norms, inputs / math.sqrt(max(1, rows))), eps)
    orthogonal = orthogonalize(m, c.polynomials, c.cubic, 1e-7, c.dtype, "add", False)
    return mul(orthogonal, math.sqrt(rows / columns) if c.normalized else math.sqrt(rows))


def scion_rule(
    param: Tensor, grad: Tensor, state: ScionState, c: ScionCoefficients
) -> tuple[Tensor, ScionState]:
    buffer = lerp(state.momentum_buffer, grad, c.weight)
    shrunk = param if c.unconstrained else mul(param, c.decay)
    direction = scion_direction(buffer, c)
    return add(shrunk, direction, c.step_size).to(param.dtype), ScionState(buffer)


SCION = Rule(
    name="scion",
    hyper=ScionHyper,
    state=ScionState,
    init=scion_init,
    state_depends_on=("norm",),
    coefficients=scion_coefficients,
    rule=scion_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("momentum", BELOW_ONE), ("scale", NON_NEGATIVE)),
    check=scion_check,
    kind="per_matrix",
    flops=scion_flops,
    stacked=True,
)


@constructor
def scion(
    lr: Scalar = 1e-3,
    momentum: Scalar = 0.9,
    norm: str = "spectral",
    scale: Scalar = 1.0,
    unconstrained: bool = False,
    normalized: bool | None = None,
    *,
    polar: PolarFactor | Sequence[Sequence[float]] | str | None = None,
    iteration_dtype: str | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Scion: steps to the corner of a ball, in a norm that is chosen for each layer.

    ``p = (1 - lr) * p - lr * scale * d``, where ``d`` has norm 1 and points along the momentum
    ``m = momentum * m + (1 - momentum) * g``. Parameters stay in the ball of radius ``scale`` if
    they start there. State: one number per parameter. Cost: for "spectral", three products of
    matrices per iteration; for all other norms, that of SGD.

    A :func:`~functional_optim.partition` gives each kind of layer its norm: in the authors' GPT,
    "spectral" for hidden matrices with a scale of 50, and "sign" for the last layer with 3000.
    "rms" is for biases.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        momentum: decay of the average of gradients, in [0, 1); one minus the authors' momentum.
        norm: the direction for a matrix of the shape (rows, columns):

            - "spectral": ``sqrt(rows / columns)`` times the orthogonal matrix of Muon;
            - "sign": the sign of each element, divided by ``columns``;
            - "row_norm": each row divided by ``sqrt(columns)`` times its norm;
            - "col_norm": each column divided by its root mean square;
            - "rms", for a vector: the vector divided by its root mean square.
        scale: radius of the ball, >= 0.
        unconstrained: leave out the factor ``1 - lr``, so that parameters can leave the ball.
        normalized: divide directions by ``columns`` (for "sign" and "col_norm") or by its root (for
            "spectral" and "row_norm"), for layers whose inputs are not one-hot vectors. None is the
            authors' default: False for "col_norm", else True.
        polar: the polynomial of each iteration of "spectral", a
            :class:`~functional_optim.PolarFactor`; None for five iterations with Muon's polynomial.
        iteration_dtype: dtype of the iteration of "spectral": "bfloat16" (or None), "float16",
            "float32", "float64", or "parameter" for the dtype of the momentum.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. It needs whole tensors (``kind="per_matrix"``), and
        they are real matrices, or real vectors for "rms": its ``init`` raises ValueError for a
        parameter of another number of dimensions. It does not initialize parameters, as the
        authors' ``init`` does. torch has no such class.

    Example::

        >>> import torch
        >>> optimizer = scion(lr=0.5, norm="sign", scale=2.0)
        >>> weight, grad = torch.ones(2, 2), torch.tensor([[3.0, 0.1], [-0.2, -1.0]])
        >>> optimizer.update(weight, grad, optimizer.init(weight))[0]
        tensor([[0., 0.],
                [1., 1.]])

    Reference:
        Pethick et al., "Training deep learning models with norm-constrained LMOs", ICML 2025,
        arXiv 2502.07529, algorithms 1 and 2.
    """
    return chain(
        maximized(maximize),
        SCION(
            lr=lr,
            momentum=momentum,
            norm=norm,
            scale=scale,
            unconstrained=unconstrained,
            normalized=norm != "col_norm" if normalized is None else normalized,
            polar=encode_polar(polar),
            iteration_dtype=iteration_dtype or "bfloat16",
        ),
    )
