"""GaLore: AdamW whose averages are of gradients projected to a low rank; Zhao et al. 2024.

For a parameter of m rows and n columns with m >= n, let r = min(rank, m, n). Step 1 and every T-th
step after it compute P, the first r right singular vectors of the gradient. Each step is

    R_t = G_t P
    m_t = b1 * m_{t-1} + (1 - b1) * R_t,   v_t = b2 * v_{t-1} + (1 - b2) * R_t^2
    N_t = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + eps)
    p_t = (1 - lr * lambda) * p_{t-1} - lr * a * N_t P^T

With m < n, P holds left singular vectors, R_t = P^T G_t, and the direction is P N_t. The averages
do not change when P does. The sign of a singular vector is arbitrary, and the paper leaves it open.
Here each column of P gets the sign that gives it no negative product with the column it replaces
(of the identity, at step 1). So steps do not depend on the signs that LAPACK chooses.

GaLore is one rule, and not a transform before another optimizer. A stage of a chain gets state for
the shape of the parameter, and a transform must keep the shape of the gradient. Adam runs here on
R_t, which has another shape, and its direction must be projected back before the step.

The defaults are those of the authors' program, galore-torch. That program and all others project a
square matrix from the right, as this rule does; the paper projects it from the left. That program
also takes signs as LAPACK chooses them, adds eps to sqrt(v_t) without its correction, and applies
the decay after the step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import adam_denominator
from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.core.matrices import product_flops, require_matrix, svd_flops
from functional_optim.numeric import add, addcmul, lerp, mul
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class GaLoreState(NamedTuple):
    # For a parameter of shape (m, n), all in its dtype, or in float32 if that has 16 bits.
    exp_avg: Tensor  # m, (m, r), or (r, n) where m < n
    exp_avg_sq: Tensor  # v, the same
    projection: Tensor  # P, (n, r), or (m, r) where m < n; of the identity at first


class GaLoreHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    scale: float  # a
    rank: int  # most rows or columns of the projected gradient
    update_proj_gap: int  # T


class GaLoreCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    root: float  # sqrt(1 - b2^t)
    eps: float
    step_size: float  # -lr * a / (1 - b1^t)
    refresh: bool  # True if this step computes P


def galore_init(param: Tensor, hyper: GaLoreHyper) -> GaLoreState:
    require_matrix("galore_adamw", param)
    rows, columns = param.shape
    rank = min(hyper.rank, rows, columns)
    zero = widen(torch.zeros_like(param))
    projected = (rows, rank) if rows >= columns else (rank, columns)
    return GaLoreState(
        zero.new_zeros(projected),
        zero.new_zeros(projected),
        torch.eye(min(rows, columns), rank, dtype=zero.dtype, device=zero.device),
    )


def galore_flops(shape: tuple[int, ...], hyper: GaLoreHyper) -> int:
    rows, columns = shape
    products = 2 * product_flops(rows, columns, min(hyper.rank, rows, columns))
    return products + svd_flops(rows, columns) // hyper.update_proj_gap


def galore_coefficients(step: float, hyper: GaLoreHyper) -> GaLoreCoefficients:
    beta_1, beta_2 = hyper.betas
    return GaLoreCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        (1 - beta_2**step) ** 0.5,
        hyper.eps,
        -(hyper.lr * hyper.scale / (1 - beta_1**step)),
        (step - 1.0) % float(hyper.update_proj_gap) == 0.0,
    )


def singular_vectors(grad: Tensor, old: Tensor) -> Tensor:
    """Return the first singular vectors of the shorter side, a constant for derivatives.

    For a gradient that is not finite, return the vectors of a zero matrix, since LAPACK would raise
    and stop the steps of all parameters. Each vector gets the sign of the old vector.
    """
    known = grad.detach()
    finite = known.isfinite().flatten(-2).all(-1)[..., None, None]
    left, _, right = torch.linalg.svd(
        torch.where(finite, known, torch.zeros_like(known)), full_matrices=False
    )
    vectors: Tensor = right.mT if grad.size(-2) >= grad.size(-1) else left
    vectors = vectors[..., : old.size(-1)]
    turns = (vectors * old).sum(-2, keepdim=True) < 0
    # Rounding of products depends on strides, and each executor has other strides here.
    return torch.where(turns, -vectors, vectors).contiguous()


def refresh_projection(grad: Tensor, old: Tensor, c: GaLoreCoefficients) -> Tensor:
    """Return a new projection if this step computes one, else the old projection."""
    if isinstance(c.refresh, Tensor):
        # torch.func or a compiler hides the step count.
        return torch.where(c.refresh, singular_vectors(grad, old), old)
    if not c.refresh:
        return old
    return singular_vectors(grad, old)


def galore_rule(
    param: Tensor, grad: Tensor, state: GaLoreState, c: GaLoreCoefficients
) -> tuple[Tensor, GaLoreState]:
    wide = widen(grad).contiguous()  # rounding of products depends on strides
    from_right = grad.size(-2) >= grad.size(-1)
    projection = refresh_projection(wide, state.projection, c)
    seen = wide @ projection if from_right else projection.mT @ wide
    exp_avg = lerp(state.exp_avg, seen, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), seen, seen, c.weight_2)
    step = exp_avg / adam_denominator(exp_avg_sq, c.root, c.eps)
    direction = step @ projection.mT if from_right else projection @ step
    new = add(param, direction, c.step_size).to(param.dtype)
    return new, GaLoreState(exp_avg, exp_avg_sq, projection)


GALORE_ADAMW = Rule(
    name="galore_adamw",
    hyper=GaLoreHyper,
    state=GaLoreState,
    init=galore_init,
    state_depends_on=("rank",),
    coefficients=galore_coefficients,
    rule=galore_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("scale", FINITE_NON_NEGATIVE),
        ("rank", Interval(low=1)),
        ("update_proj_gap", Interval(low=1)),
    ),
    kind="per_matrix",
    flops=galore_flops,
    stacked=True,
)


@constructor
def galore_adamw(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    *,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: Scalar = 0.25,
    maximize: bool = False,
) -> Optimizer:
    """GaLore: AdamW on gradients projected to a low rank, so that its averages need less memory.

    ``p = (1 - lr * weight_decay) * p - lr * scale * N P^T``, where ``N`` is Adam's direction for
    the projected gradients ``g P``, and ``P`` holds the first ``rank`` right singular vectors of a
    gradient. A matrix with more columns than rows is projected from the left.

    State: for a matrix with sides ``s <= l`` and ``r = min(rank, s)``, ``2 l r + s r`` numbers.
    Cost: two products of ``2 s l r`` multiplications for each step, and a singular value
    decomposition every ``update_proj_gap`` steps.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        rank: largest rank of the projected gradient, a whole number >= 1.
        update_proj_gap: number of steps between two computations of ``P``, a whole number >= 1.
        scale: factor of the step, a finite number >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. It needs whole tensors (``kind="per_matrix"``), and
        they are real matrices: its ``init`` raises ValueError for a parameter of another number of
        dimensions. The averages are kept when ``P`` changes. ``P`` is a constant for a derivative
        through a step. torch has no such class.

    Example::

        >>> import torch
        >>> optimizer = galore_adamw(lr=0.1, rank=1, scale=1.0)
        >>> weight, grad = torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight  # along the first singular vectors only
        tensor([[-0.1000,  0.0000],
                [ 0.0000,  0.0000]])
        >>> state.leaves.stages[-1].exp_avg.shape
        torch.Size([2, 1])

    Reference:
        Zhao, Zhang, Chen, Wang, Anandkumar, Tian, "GaLore: memory-efficient LLM training by
        gradient low-rank projection", ICML 2024, arXiv 2403.03507, algorithm 2.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        GALORE_ADAMW(
            lr=lr, betas=betas, eps=eps, scale=scale, rank=rank, update_proj_gap=update_proj_gap
        ),
    )
