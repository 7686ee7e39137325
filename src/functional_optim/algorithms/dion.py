"""Dion: orthonormal steps of low rank with error feedback; Ahn et al. 2025, algorithm 1.

    B_t = M_{t-1} + G_t                                         (M_0 = 0)
    P_t = the orthonormal columns of B_t Q_{t-1}                (QR)
    R_t = B_t^T P_t
    M_t = B_t - (1 - mu) * P_t R_t^T
    Q_t = R_t with each column divided by its norm
    p_t = (1 - lr * lambda) * p_{t-1} - lr * sqrt(A / B) * P_t Q_t^T

for a matrix of A rows and B columns. P_t R_t^T is one step of the power method towards the best
approximation of B_t of rank r. The rest of B_t stays in M_t, the error feedback.

Q_0 is a matrix of cosines, the first r columns of the orthonormal discrete cosine transform, so
that equal parameters have equal states. The authors draw normal numbers instead. If a column of R_t
is 0, Q_t keeps the column of Q_{t-1}, and the step leaves it out. Algorithm 1 states no defaults.
The defaults are those of the authors' program (microsoft/dion, ``dion_simple``).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE, UNIT, Interval
from functional_optim.core.matrices import product_flops, qr_flops, require_matrix
from functional_optim.numeric import add, shift
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class DionState(NamedTuple):
    # For a parameter of shape (m, n), in its dtype, or in float32 if that has 16 bits.
    momentum_buffer: Tensor  # M, (m, n)
    right_basis: Tensor  # Q, (n, min(rank, m, n))


class DionHyper(NamedTuple):
    lr: float  # learning rate
    momentum: float  # mu
    eps: float  # added to the norms of columns
    rank: int  # r, the most columns of Q


class DionCoefficients(NamedTuple):
    feedback: float  # -(1 - mu)
    lr: float
    eps: float


def cosines(size: int, count: int, like: Tensor) -> Tensor:
    """Return the first columns of the orthonormal discrete cosine transform."""
    rows = torch.arange(size, device=like.device)[:, None]
    columns = torch.arange(count, device=like.device)
    turns = ((2 * rows + 1) * columns) % (4 * max(1, size))  # whole numbers: cosines stay exact
    angles = turns.to(like.dtype) * (math.pi / (2 * max(1, size)))
    squares = (2.0 - (columns == 0).to(like.dtype)) / max(1, size)
    return angles.cos() * squares.sqrt()


def dion_init(param: Tensor, hyper: DionHyper) -> DionState:
    require_matrix("dion", param)
    zero = widen(torch.zeros_like(param))
    rows, columns = param.shape
    return DionState(zero, cosines(columns, min(hyper.rank, rows, columns), zero))


def dion_flops(shape: tuple[int, ...], hyper: DionHyper) -> int:
    rows, columns = shape
    rank = min(hyper.rank, rows, columns)
    return 4 * product_flops(rows, columns, rank) + qr_flops(rows, rank)


def dion_coefficients(step: float, hyper: DionHyper) -> DionCoefficients:
    return DionCoefficients(-(1 - hyper.momentum), hyper.lr, hyper.eps)


def dion_rule(
    param: Tensor, grad: Tensor, state: DionState, c: DionCoefficients
) -> tuple[Tensor, DionState]:
    total = state.momentum_buffer + widen(grad)
    left = torch.linalg.qr(total @ state.right_basis)[0]
    right = total.mT @ left
    norms = (right * right).sum(-2, keepdim=True).sqrt()
    basis = right / shift(norms, c.eps)
    buffer = add(total, left @ right.mT, c.feedback)
    scale = math.sqrt(param.size(-2) / max(1, param.size(-1)))
    new = add(param, left @ basis.mT, -c.lr * scale).to(param.dtype)
    return new, DionState(buffer, torch.where(norms > 0.0, basis, state.right_basis))


DION = Rule(
    name="dion",
    hyper=DionHyper,
    state=DionState,
    init=dion_init,
    state_depends_on=("rank",),
    coefficients=dion_coefficients,
    rule=dion_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("momentum", UNIT),
        ("eps", NON_NEGATIVE),
        ("rank", Interval(low=1)),
    ),
    kind="per_matrix",
    flops=dion_flops,
    stacked=True,
)


@constructor
def dion(
    lr: Scalar = 0.01,
    weight_decay: Scalar = 0.01,
    momentum: Scalar = 0.95,
    rank: int = 768,
    eps: Scalar = 1e-8,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Dion: steps of low rank with orthonormal columns, by one step of the power method.

    ``p = (1 - lr * weight_decay) * p - lr * sqrt(rows / columns) * P Q^T``, where ``P`` has
    orthonormal columns and ``Q`` has columns of norm 1. ``P R^T`` approximates the momentum with
    ``rank`` columns, and ``Q`` is the normalized ``R``. The momentum loses only the part
    ``(1 - momentum) * P R^T``, so that later steps make up for what this one leaves out. State:
    ``1 + rank / rows`` numbers per parameter. Cost: four products of the matrix with ``rank``
    columns, and one QR decomposition of a matrix of the shape (rows, rank). Ranks exchange whole
    matrices, not factors.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        weight_decay: coefficient of the decoupled decay, >= 0.
        momentum: part of the approximation that stays in the momentum, in [0, 1].
        rank: number of columns of the factors, a whole number >= 1, and at most the shorter side of
            a matrix.
        eps: added to the norms of columns, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. It needs whole tensors (``kind="per_matrix"``), and
        they are real matrices: its ``init`` raises ValueError for a parameter of another number of
        dimensions. The first basis is a matrix of cosines, the same for all matrices of a shape.
        torch has no such class.

    Example::

        >>> import torch
        >>> optimizer = dion(lr=0.5, weight_decay=0.0, rank=1)
        >>> weight, grad = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 0.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight
        tensor([[-0.5000,  0.0000],
                [ 0.0000,  0.0000]])

    Reference:
        Ahn et al., "Dion: distributed orthonormalized updates", arXiv 2504.05295, 2025,
        algorithm 1.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        DION(lr=lr, momentum=momentum, eps=eps, rank=rank),
    )
