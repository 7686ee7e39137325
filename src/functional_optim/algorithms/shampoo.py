"""Shampoo: Gupta et al. 2018, algorithm 1, in the form of Shi et al. 2023, algorithm 2.

For each block of b x b elements of a matrix, with gradient G:

    L_t = b2 * L_{t-1} + (1 - b2) * G_t G_t^T,  R_t = b2 * R_{t-1} + (1 - b2) * G_t^T G_t
    m_t = b1 * m_{t-1} + (1 - b1) * G_t,        u_t = m_t / (1 - b1^t)
    d_t = (L_t / c + eps * I)^-a  u_t  (R_t / c + eps * I)^-a,  c = 1 - b2^t,  a = 1 / 4
    p_t = (1 - lr * lambda) * p_{t-1} - lr * s_t * d_t

With b2 = 1 the factors L and R are sums, and c = 1, as in the paper of 2018. Only every k-th step
computes the inverse roots. Grafting gives each block the step length of another optimizer:
s_t = |w_t| / |d_t| in Frobenius norms, where w_t is the direction of that optimizer. Before the
first roots are computed, w_t itself is the step. Without grafting, s_t = 1 and w_t = u_t.

The directions w_t are u_t for SGD, and u_t / (sqrt(v_t) + graft_eps) for the others, with the
decay gb of v: v_t = v_{t-1} + G_t^2 for AdaGrad, v_t = gb * v_{t-1} + (1 - gb) * G_t^2 for RMSprop,
and the same v_t divided by 1 - gb^t for Adam.

Defaults are those of the program of Shi et al. A sum of positive parts has no negative eigenvalue,
so an eigenvalue that rounding made negative counts as 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import (
    BELOW_ONE,
    FINITE_NON_NEGATIVE,
    NON_NEGATIVE,
    UNIT,
    Interval,
    check_choice,
)
from functional_optim.core.matrices import (
    eigen_flops,
    norms,
    product_flops,
    require_matrix,
    symmetric_eigen,
)
from functional_optim.numeric import add, addcmul, at_first_step, div, lerp, mul, power, shift
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay

GRAFTS = (None, "sgd", "adagrad", "rmsprop", "adam")
ROOT_DTYPES = (None, "float64")


class ShampooState(NamedTuple):
    # For a parameter of shape (m, n). All in its dtype, or in float32 if that has 16 bits.
    # The lists have an entry for each block of (r, c) elements, row by row.
    exp_avg: Tensor  # m, (m, n)
    graft_sq: list[Tensor]  # [v], (m, n); [] for a graft without v
    left: list[Tensor]  # L, (r, r)
    right: list[Tensor]  # R, (c, c)
    left_root: list[Tensor]  # (L / c + eps * I)^-a, (r, r); I before the first
    right_root: list[Tensor]  # (R / c + eps * I)^-a, (c, c); I before the first


class ShampooHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m, and of L and R; 1.0 for sums
    eps: float  # added to the eigenvalues of L and R
    exponent: float  # a
    graft_beta: float  # decay of v
    graft_eps: float  # added to the root of v
    block_size: int  # b
    precondition_frequency: int  # k
    start_preconditioning_step: int  # step that computes the first roots
    graft: str | None  # one of GRAFTS
    root_dtype: str | None  # of the eigenvalues: one of ROOT_DTYPES


class ShampooCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    correction_1: float  # 1 - b1^t
    beta_2: float
    weight_2: float  # 1 - b2, or 1 for sums
    correction_2: float  # 1 - b2^t, or 1 for sums
    eps: float
    exponent: float  # -a
    step_size: float  # -lr
    graft_beta: float  # gb, or 1 for AdaGrad's sum
    graft_weight: float  # 1 - gb, or 1 for AdaGrad's sum
    graft_correction: float  # 1 - gb^t for Adam, else 1
    graft_eps: float
    block_size: int
    grafted: bool
    wide_roots: bool  # True if roots are computed in float64
    refresh: bool  # True if this step computes roots
    started: bool  # True if this step uses roots


def blocks_of(size: int, block_size: int) -> list[int]:
    """Return the sizes of the blocks of one side; an empty side has one block of size 0."""
    sizes = [block_size] * (size // block_size)
    if size % block_size or not sizes:
        sizes.append(size % block_size)
    return sizes


def shampoo_init(param: Tensor, hyper: ShampooHyper) -> ShampooState:
    require_matrix("shampoo", param)
    zero = widen(torch.zeros_like(param))
    rows, columns = (blocks_of(size, hyper.block_size) for size in param.shape)
    sides = [[r for r in rows for _ in columns], [c for _ in rows for c in columns]]
    factors = [[zero.new_zeros(size, size) for size in side] for side in sides]
    roots = [
        [torch.eye(size, dtype=zero.dtype, device=zero.device) for size in side] for side in sides
    ]
    has_squares = hyper.graft not in (None, "sgd")
    return ShampooState(zero, [torch.zeros_like(zero)] if has_squares else [], *factors, *roots)


def shampoo_flops(shape: tuple[int, ...], hyper: ShampooHyper) -> int:
    """Return the operations per block: four products, and two roots in every k-th step."""
    total = 0
    for rows in blocks_of(shape[0], hyper.block_size):
        for columns in blocks_of(shape[1], hyper.block_size):
            total += 2 * product_flops(rows, rows, columns)
            total += 2 * product_flops(rows, columns, columns)
            roots = sum(eigen_flops(n) + product_flops(n, n, n) for n in (rows, columns))
            total += roots // hyper.precondition_frequency
    return total


def shampoo_check(hyper: ShampooHyper) -> None:
    check_choice("shampoo", "graft", hyper.graft, GRAFTS)
    check_choice("shampoo", "root_dtype", hyper.root_dtype, ROOT_DTYPES)
    if hyper.betas[0] == 1.0:
        raise ValueError("shampoo: betas[0] must be a number >= 0 and < 1, got 1.0")


def shampoo_coefficients(step: float, hyper: ShampooHyper) -> ShampooCoefficients:
    beta_1, beta_2 = hyper.betas
    graft_beta, graft_weight, graft_correction = hyper.graft_beta, 1 - hyper.graft_beta, 1.0
    name = hyper.graft
    if name is not None and name == "adagrad":
        graft_beta, graft_weight = 1.0, 1.0
    if name is not None and name == "adam":
        graft_correction = 1 - hyper.graft_beta**step
    start = float(hyper.start_preconditioning_step)
    due = (step % float(hyper.precondition_frequency) == 0.0) & (step > start)
    return ShampooCoefficients(
        1 - beta_1,
        1 - beta_1**step,
        beta_2,
        at_first_step(beta_2, 1.0, 1 - beta_2),  # tests if beta_2 is 1, not the step
        at_first_step(beta_2, 1.0, 1 - beta_2**step),
        hyper.eps,
        -hyper.exponent,
        -hyper.lr,
        graft_beta,
        graft_weight,
        graft_correction,
        hyper.graft_eps,
        hyper.block_size,
        name is not None,
        hyper.root_dtype is not None,
        due | (step == start),
        step >= start,
    )


def split_blocks(x: Tensor, block_size: int) -> list[Tensor]:
    """Return the blocks of a matrix, row by row."""
    blocks: list[Tensor] = []
    for row in x.split(block_size, -2):
        for block in row.split(block_size, -1):
            blocks.append(block)  # noqa: PERF402  TorchScript
    return blocks


def join_blocks(blocks: list[Tensor], columns: int) -> Tensor:
    """Return the matrix that consists of these blocks, ``columns`` blocks per row."""
    if len(blocks) == 1:
        return blocks[0]
    rows = [
        torch.cat(blocks[start : start + columns], -1) for start in range(0, len(blocks), columns)
    ]
    return torch.cat(rows, -2)


def inverse_root(factor: Tensor, c: ShampooCoefficients) -> Tensor:
    """Return ``(factor / correction + eps * I)^-a``, a constant for derivatives."""
    known = factor.to(torch.float64) if c.wide_roots else factor
    values, vectors = symmetric_eigen(div(known, c.correction_2))
    root = power(shift(values.clamp(min=0.0), c.eps), c.exponent)
    return ((vectors * root.unsqueeze(-2)) @ vectors.mT).to(factor.dtype)


def refresh_roots(factors: list[Tensor], old: list[Tensor], c: ShampooCoefficients) -> list[Tensor]:
    """Return new inverse roots if this step computes them, else the old roots."""
    if isinstance(c.refresh, Tensor):
        # torch.func or a compiler hides the step count.
        pairs = zip(factors, old, strict=True)
        return [torch.where(c.refresh, inverse_root(one, c), root) for one, root in pairs]
    if not c.refresh:
        return old
    return [inverse_root(one, c) for one in factors]


def precondition(
    update: Tensor, graft: Tensor, left: list[Tensor], right: list[Tensor], c: ShampooCoefficients
) -> Tensor:
    """Precondition and graft each block of a matrix."""
    blocks: list[Tensor] = []
    grafts = split_blocks(graft, c.block_size)
    for i, block in enumerate(split_blocks(update, c.block_size)):
        direction = left[i] @ block @ right[i]
        if c.grafted:
            direction = direction * (norms(grafts[i]) / (norms(direction) + 1e-16))
        blocks.append(direction)
    return join_blocks(blocks, max(1, -(-update.size(-1) // c.block_size)))


def shampoo_direction(
    update: Tensor, graft: Tensor, left: list[Tensor], right: list[Tensor], c: ShampooCoefficients
) -> Tensor:
    """Return the direction of this step: that of the graft, until the first roots are computed."""
    if isinstance(c.started, Tensor):
        return torch.where(c.started, precondition(update, graft, left, right, c), graft)
    if not c.started:
        return graft
    return precondition(update, graft, left, right, c)


def shampoo_rule(
    param: Tensor, grad: Tensor, state: ShampooState, c: ShampooCoefficients
) -> tuple[Tensor, ShampooState]:
    wide = widen(grad).contiguous()  # rounding of products depends on strides
    exp_avg = lerp(state.exp_avg, wide, c.weight_1)
    update = div(exp_avg, c.correction_1)
    squares = [
        addcmul(mul(one, c.graft_beta), wide, wide, c.graft_weight) for one in state.graft_sq
    ]
    graft = update
    for one in squares:
        graft = update / shift(div(one, c.graft_correction).sqrt(), c.graft_eps)
    left: list[Tensor] = []
    right: list[Tensor] = []
    for i, block in enumerate(split_blocks(wide, c.block_size)):
        left.append(add(mul(state.left[i], c.beta_2), block @ block.mT, c.weight_2))
        right.append(add(mul(state.right[i], c.beta_2), block.mT @ block, c.weight_2))
    left_root = refresh_roots(left, state.left_root, c)
    right_root = refresh_roots(right, state.right_root, c)
    direction = shampoo_direction(update, graft, left_root, right_root, c)
    new = add(param, direction, c.step_size).to(param.dtype)
    return new, ShampooState(exp_avg, squares, left, right, left_root, right_root)


SHAMPOO = Rule(
    name="shampoo",
    hyper=ShampooHyper,
    state=ShampooState,
    init=shampoo_init,
    state_depends_on=("graft", "block_size"),
    coefficients=shampoo_coefficients,
    rule=shampoo_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", UNIT),
        ("eps", NON_NEGATIVE),
        ("exponent", FINITE_NON_NEGATIVE),
        ("graft_beta", BELOW_ONE),
        ("graft_eps", NON_NEGATIVE),
        ("block_size", Interval(low=1)),
        ("precondition_frequency", Interval(low=1)),
        ("start_preconditioning_step", Interval(low=1)),
    ),
    check=shampoo_check,
    kind="per_matrix",
    flops=shampoo_flops,
    stacked=True,
)


@constructor
def shampoo(
    lr: Scalar = 1e-2,
    betas: tuple[Scalar, Scalar] = (0.9, 1.0),
    eps: Scalar = 1e-12,
    weight_decay: Scalar = 0.0,
    *,
    block_size: int = 1024,
    precondition_frequency: int = 1,
    start_preconditioning_step: int | None = None,
    exponent: Scalar = 0.25,
    graft: str | None = None,
    graft_beta: Scalar = 0.999,
    graft_eps: Scalar = 1e-8,
    root_dtype: str | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Shampoo: gradients preconditioned on both sides by inverse roots of their second moments.

    ``p = (1 - lr * weight_decay) * p - lr * s * (L + eps)^-a u (R + eps)^-a``, where ``L`` and
    ``R`` are sums or averages of ``g g^T`` and ``g^T g``, ``u`` is the bias-corrected average of
    gradients, and grafting chooses the factor ``s``. A matrix that is larger than ``block_size`` is
    preconditioned block by block.

    State: for each block of r rows and c columns ``2 (r^2 + c^2)`` numbers, and for each parameter
    one number, or two with a graft other than "sgd". Cost: ``2 r c (r + c)`` multiplications for
    each block and step, twice, and two eigenvalue decompositions for each block at every
    ``precondition_frequency``-th step.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the average of gradients, in [0, 1), and of ``L`` and ``R``, in [0, 1];
            with 1.0, these are sums, as in AdaGrad.
        eps: added to the eigenvalues of ``L`` and ``R``, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        block_size: largest number of rows and of columns of a block, a whole number >= 1.
        precondition_frequency: number of steps between two computations of the inverse roots, a
            whole number >= 1.
        start_preconditioning_step: number of the step that first computes the roots, a whole number
            >= 1. Earlier steps are those of the graft. None for ``precondition_frequency``.
        exponent: ``a``, a finite number >= 0. The paper has 1/4 for a matrix; 1/2 gives the factors
            of the optimal Kronecker approximation.
        graft: optimizer whose step length each block takes: None, "sgd", "adagrad", "rmsprop" or
            "adam".
        graft_beta: decay of the average of squares for "rmsprop" and "adam", in [0, 1).
        graft_eps: added to the root of these squares, >= 0.
        root_dtype: dtype in which inverse roots are computed: None for the dtype of the state, or
            "float64".
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. It needs whole tensors (``kind="per_matrix"``), and
        they are real matrices: its ``init`` raises ValueError for a parameter of another number of
        dimensions. The inverse roots are constants for a derivative through a step. torch has no
        such class.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = shampoo(lr=0.5)
        >>> weight, grad = torch.zeros(2, 2), torch.tensor([[0.0, 3.0], [2.0, 0.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight  # minus lr times the nearest orthogonal matrix of the gradient
        tensor([[ 0.0000, -0.5000],
                [-0.5000,  0.0000]])

    Reference:
        Gupta, Koren, Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018,
        algorithm 1; Shi et al., "A distributed data-parallel PyTorch implementation of the
        distributed Shampoo optimizer for training neural networks at-scale", arXiv 2309.06497,
        2023, algorithm 2, whose program has these defaults.
    """
    start = start_preconditioning_step
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        SHAMPOO(
            lr=lr,
            betas=betas,
            eps=eps,
            exponent=exponent,
            graft_beta=graft_beta,
            graft_eps=graft_eps,
            block_size=block_size,
            precondition_frequency=precondition_frequency,
            start_preconditioning_step=precondition_frequency if start is None else start,
            graft=graft,
            root_dtype=root_dtype,
        ),
    )
