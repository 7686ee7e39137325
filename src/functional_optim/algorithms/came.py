"""CAME: Luo et al. 2023, algorithm 2: Adafactor's factors, and confidence in each step.

Of a matrix g_t of n rows and m columns, with means over the last dimension (mean_r) or the last but
one (mean_c), and elementwise products:

    r_t = b2 * r_{t-1} + (1 - b2) * mean_r(g_t^2 + e1)
    c_t = b2 * c_{t-1} + (1 - b2) * mean_c(g_t^2 + e1)
    u_t = g_t / sqrt(v_t),                                        v_t = r_t c_t / mean(r_t)
    u_t = u_t / max(1, RMS(u_t) / d)
    m_t = b1 * m_{t-1} + (1 - b1) * u_t
    R_t = b3 * R_{t-1} + (1 - b3) * mean_r((u_t - m_t)^2 + e2)
    C_t = b3 * C_{t-1} + (1 - b3) * mean_c((u_t - m_t)^2 + e2)
    p_t = (1 - lr * lambda) * p_{t-1} - lr * m_t / sqrt(S_t),     S_t = R_t C_t / mean(R_t)

The paper takes sums instead of means, which gives the same v and S. A tensor of more than two
dimensions is a batch of matrices, and RMS is that of the whole tensor. The paper covers matrices
only. As in its authors' program, a tensor of less than two dimensions averages g_t^2 + e1 into
v_t itself, and its step is p_t = p_{t-1} - lr * m_t.

Defaults are the paper's; ``lr=2e-4`` is that of its authors' program. Averages have no bias
correction: with the default betas the first steps of a matrix are about ten times lr.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, POSITIVE
from functional_optim.numeric import add, clamp, div, lerp, mul, shift
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay
from functional_optim.transforms.scale_by_trust_ratio import norm_of


class CameState(NamedTuple):
    # For a parameter of shape (..., n, m). All in its dtype, or in float32 if that has 16 bits.
    exp_avg: Tensor  # m, of the parameter's shape
    exp_avg_sq: list[Tensor]  # [v] of that shape for less than two dimensions; else []
    exp_avg_sq_row: list[Tensor]  # [r], (..., n); [] for less than two dimensions
    exp_avg_sq_col: list[Tensor]  # [c], (..., m); [] for less than two dimensions
    exp_avg_res_row: list[Tensor]  # [R], of the shape of r
    exp_avg_res_col: list[Tensor]  # [C], of the shape of c


class CameHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float, float]  # decay of m, of r and c, of R and C
    eps: tuple[float, float]  # e1, e2: added to squares
    clip_threshold: float  # d


class CameCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    beta_3: float
    weight_3: float  # 1 - b3
    eps_1: float
    eps_2: float
    clip_threshold: float
    lr: float


def came_init(param: Tensor, hyper: CameHyper) -> CameState:
    zero = widen(torch.zeros_like(param))
    if param.dim() < 2:
        return CameState(zero, [torch.zeros_like(zero)], [], [], [], [])
    rows, columns = param.shape[:-1], (*param.shape[:-2], param.shape[-1])
    factors = [[zero.new_zeros(shape)] for shape in (rows, columns, rows, columns)]
    return CameState(zero, [], *factors)


def came_coefficients(step: float, hyper: CameHyper) -> CameCoefficients:
    beta_1, beta_2, beta_3 = hyper.betas
    return CameCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        beta_3,
        1 - beta_3,
        hyper.eps[0],
        hyper.eps[1],
        hyper.clip_threshold,
        hyper.lr,
    )


def mean_over(x: Tensor, dim: int) -> Tensor:
    """Return the mean over a dimension; 0 where it has no element."""
    return x.sum(dim) / max(1, x.size(dim))


def average_factors(
    row: Tensor, column: Tensor, square: Tensor, beta: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Average the row and column means of a tensor of squares into both factors.

    The squares are made contiguous first, so that means do not depend on strides.
    """
    square = square.contiguous()
    new_row = add(mul(row, beta), mean_over(square, -1), weight)
    return new_row, add(mul(column, beta), mean_over(square, -2), weight)


def divide_by_root(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Divide by the root of ``row * column / mean(row)``. Avoid the product: it may underflow."""
    share = row / mean_over(row, -1).unsqueeze(-1)
    return x * share.rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)


def clip_by_rms(x: Tensor, threshold: float) -> Tensor:
    """Divide by ``max(1, RMS(x) / threshold)``."""
    rms = norm_of(x) / math.sqrt(max(1, x.numel()))
    return x / clamp(div(rms, threshold), 1.0, math.inf).to(x.dtype)


def came_rule(
    param: Tensor, grad: Tensor, state: CameState, c: CameCoefficients
) -> tuple[Tensor, CameState]:
    wide = widen(grad)
    square = shift(wide.square(), c.eps_1)
    if len(state.exp_avg_sq) > 0:
        second = add(mul(state.exp_avg_sq[0], c.beta_2), square, c.weight_2)
        update = clip_by_rms(wide * second.rsqrt(), c.clip_threshold)
        exp_avg = lerp(state.exp_avg, update, c.weight_1)
        new = CameState(exp_avg, [second], [], [], [], [])
        return add(param, exp_avg, -c.lr).to(param.dtype), new
    row, column = average_factors(
        state.exp_avg_sq_row[0], state.exp_avg_sq_col[0], square, c.beta_2, c.weight_2
    )
    update = clip_by_rms(divide_by_root(wide, row, column), c.clip_threshold)
    exp_avg = lerp(state.exp_avg, update, c.weight_1)
    instability = shift((update - exp_avg).square(), c.eps_2)
    res_row, res_column = average_factors(
        state.exp_avg_res_row[0], state.exp_avg_res_col[0], instability, c.beta_3, c.weight_3
    )
    direction = divide_by_root(exp_avg, res_row, res_column)
    new = CameState(exp_avg, [], [row], [column], [res_row], [res_column])
    return add(param, direction, -c.lr).to(param.dtype), new


CAME = Rule(
    name="came",
    hyper=CameHyper,
    state=CameState,
    init=came_init,
    state_depends_on=(),
    coefficients=came_coefficients,
    rule=came_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("clip_threshold", POSITIVE),
    ),
    kind="per_matrix",
)


@constructor
def came(
    lr: Scalar = 2e-4,
    betas: tuple[Scalar, Scalar, Scalar] = (0.9, 0.999, 0.9999),
    eps: tuple[Scalar, Scalar] = (1e-30, 1e-16),
    clip_threshold: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """CAME: Adafactor with momentum, whose steps are shorter where updates disagree with it.

    ``u`` is the gradient over the root of a second moment of rank one, clipped by its root mean
    square, and ``m`` an average of ``u``. A matrix steps by ``p = p - lr * m / sqrt(S)``, where
    ``S`` averages ``(u - m)^2``, also of rank one. Other tensors step by ``p = p - lr * m``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of ``m``, of the second moment and of ``S``, each in [0, 1).
        eps: added to squared gradients, and to ``(u - m)^2``, each >= 0. With 0, a row or a column
            of zeros gives NaN.
        clip_threshold: largest root mean square of ``u``, > 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is one tensor of the parameter's shape
        and 2 * (n + m) numbers for each n-by-m matrix, about 4 bytes per parameter; two tensors of
        its shape, 8 bytes, for a vector. All state is of float32 where the parameter has 16 bits.
        It needs whole tensors (``kind="per_matrix"``). torch has no CAME.

    Example::

        >>> import torch
        >>> optimizer = came(lr=0.5)
        >>> weight, grad = torch.ones(2, 2), torch.tensor([[3.0, -3.0], [-2.0, 2.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> (weight < 1.0).tolist()
        [[True, False], [False, True]]

    Reference:
        Luo, Ren, Zheng, Jiang, Jiang, You, "CAME: confidence-guided adaptive memory efficient
        optimization", ACL 2023, algorithm 2.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        CAME(lr=lr, betas=betas, eps=eps, clip_threshold=clip_threshold),
    )
