"""PSGD-Kron: Li 2018 and 2022, by a Kronecker product of two triangular factors.

    m_t = b1 * m_{t-1} + (1 - b1) * G_t,   u_t = m_t / (1 - b1^t)
    p_t = (1 - lr * lambda) * p_{t-1} - lr * s_t * d_t,   d_t = Q_L^T Q_L u_t Q_R^T Q_R
    s_t = min(1, c / RMS(d_t))

Before that, some steps fit Q_L and Q_R, both upper triangular, to the covariance of u. With normal
numbers V_t of the shape of the parameter, and g_t = u_t + sqrt(2^-23) * mean|u_t| * V_t:

    A = Q_L g_t Q_R^T,   B = Q_L^-T V_t Q_R^-1
    Q_L = Q_L - mu / n(A A^T + B B^T) * triu(A A^T - B B^T) Q_L
    Q_R = Q_R - mu / n(A^T A + B^T B) * triu(A^T A - B^T B) Q_R

n is a lower bound of the spectral norm. In expectation the updates stop where the covariance of A
is that of B, and then Q^T Q is the inverse square root of the covariance of g. A factor that is
diagonal is kept as a vector, and n is its largest element.

Step t fits the factors if frac(t * phi) < w_t, where phi is the golden ratio, and w_t = max(w_min,
w_0 * exp(-a * max(0, t - 1 - T))) is the update probability. So a part w of the steps fits them,
evenly spread, and the same steps on all ranks. A hundredth of these steps first scales both factors
to the same largest element. V_t is a function of a counter in the state.

The formulas and defaults are those of kron-torch, with four differences. kron-torch adds the noise
to u_t itself, so the step also moves along the noise. It draws V_t from torch's global generator,
and scales the factors at random updates. It fits as soon as 1 / w_t steps have passed since the
last update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import (
    BELOW_ONE,
    FINITE_NON_NEGATIVE,
    FINITE_POSITIVE,
    NON_NEGATIVE,
    UNIT,
    Interval,
    check_choice,
)
from functional_optim.core.matrices import product_flops, require_matrix, solve_flops
from functional_optim.core.random_normal import counter_of, normal_like
from functional_optim.numeric import add, div, fill_like, lerp
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay

MODES = (None, "smart_one_diag", "one_diag", "all_diag")


class KronState(NamedTuple):
    # For a parameter of shape (m, n). All but the counter are in its dtype, or in float32 if that
    # has 16 bits.
    exp_avg: Tensor  # m, (m, n)
    left: Tensor  # Q_L, (m, m) and upper triangular; (m,) if it is diagonal
    right: Tensor  # Q_R, (n, n) and upper triangular; (n,) if it is diagonal
    counter: Tensor  # 0-d, int64: the seed times 2^32, plus the step count


class KronHyper(NamedTuple):
    lr: float  # learning rate
    beta: float  # b1
    precond_lr: float  # mu
    precond_init_scale: float  # product of Q_L and Q_R before the first step
    max_update_rms: float  # c
    update_probability: float  # w_0
    min_update_probability: float  # w_min
    update_decay: float  # a
    flat_start: int  # T
    momentum_into_precond_update: bool  # True: fit to u_t; False: fit to G_t
    max_size_triangular: int  # a longer side has a diagonal factor
    memory_save_mode: str | None  # sides with a diagonal factor: one of MODES
    seed: int


class KronCoefficients(NamedTuple):
    weight: float  # 1 - b1
    correction: float  # 1 - b1^t
    precond_step: float  # -mu
    step_size: float  # -lr
    max_update_rms: float
    of_momentum: bool
    update: bool  # True if this step fits the factors
    balance: bool  # True if this step scales the factors first


def diagonal_sides(shape: Sequence[int], hyper: KronHyper) -> list[bool]:
    """Return True for each side of a matrix whose factor is diagonal."""
    rows, columns = shape
    longer, mode = 0 if rows > columns else 1, hyper.memory_save_mode
    chosen = [mode == "all_diag"] * 2
    if mode == "one_diag" or (mode == "smart_one_diag" and rows != columns):
        chosen[longer] = True
    return [
        one or size == 1 or size > hyper.max_size_triangular
        for one, size in zip(chosen, shape, strict=True)
    ]


def kron_init(param: Tensor, hyper: KronHyper) -> KronState:
    require_matrix("kron", param)
    zero = widen(torch.zeros_like(param))
    ones = [fill_like(zero.new_zeros(n), hyper.precond_init_scale).sqrt() for n in param.shape]
    left, right = (
        one if is_vector else torch.diag(one)
        for one, is_vector in zip(ones, diagonal_sides(param.shape, hyper), strict=True)
    )
    return KronState(zero, left, right, counter_of(hyper.seed, param))


def kron_flops(shape: tuple[int, ...], hyper: KronHyper) -> int:
    """Return the operations of the direction, and of the part of the steps that fits the factors.

    This part is the limit after many steps.
    """
    first = hyper.update_probability if hyper.update_decay == 0.0 else 0.0
    direction = fitting = 0
    sides = zip((shape, shape[::-1]), diagonal_sides(shape, hyper), strict=True)
    for side, other in (pair for pair, is_vector in sides if not is_vector):
        direction += 2 * product_flops(side, side, other)
        fitting += product_flops(side, side, 3 * other + side + 2) + solve_flops(side, other)
    return direction + round(float(max(first, hyper.min_update_probability)) * fitting)


def kron_check(hyper: KronHyper) -> None:
    check_choice("kron", "memory_save_mode", hyper.memory_save_mode, MODES)


def kron_coefficients(step: float, hyper: KronHyper) -> KronCoefficients:
    waited = step - 1.0 - float(hyper.flat_start)
    late = (waited + abs(waited)) / 2  # max(0, waited), also for a tensor
    now, least = hyper.update_probability, hyper.min_update_probability
    now = now * 2.718281828459045 ** (-hyper.update_decay * late)
    now = (now + least + abs(now - least)) / 2  # max(now, least)
    phase = (step * 0.6180339887498949) % 1.0
    return KronCoefficients(
        1 - hyper.beta,
        1 - hyper.beta**step,
        -hyper.precond_lr,
        -hyper.lr,
        hyper.max_update_rms,
        hyper.momentum_into_precond_update,
        phase < now,
        phase < now * 0.01,
    )


def is_diagonal(factor: Tensor, matrix: Tensor) -> bool:
    """Return True if a factor is kept as a vector; both may be stacked."""
    return factor.dim() < matrix.dim()


def product(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return ``Q X`` for a factor that is a matrix or a diagonal."""
    return factor.unsqueeze(-1) * matrix if is_diagonal(factor, matrix) else factor @ matrix


def transposed_product(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return ``Q^T X``."""
    return factor.unsqueeze(-1) * matrix if is_diagonal(factor, matrix) else factor.mT @ matrix


def solve_transposed(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return ``Q^-T X``."""
    if is_diagonal(factor, matrix):
        return matrix / factor.unsqueeze(-1)
    solution: Tensor = torch.linalg.solve_triangular(factor.mT, matrix, upper=False)
    return solution


def largest(x: Tensor, is_vector: bool) -> Tensor:
    """Return the largest magnitude of each vector or matrix, with the dimensions of ``x``."""
    if is_vector:
        return x.abs().amax(-1, keepdim=True)
    return x.abs().amax((-2, -1), keepdim=True)


def norm_lower_bound(x: Tensor) -> Tensor:
    """Return a lower bound of the spectral norm of each symmetric matrix: of shape (..., 1, 1).

    It is the norm of ``X^2 x / |X x|``, where ``x`` is the column with the largest norm.
    """
    most = largest(x, is_vector=False).clamp(min=2.0**-126)
    scaled = x / most
    index = scaled.square().sum(-2, keepdim=True).argmax(-1, keepdim=True)
    column = scaled.gather(-1, index.expand(scaled[..., :1].shape))
    image = scaled @ column
    image = image / lengths(image).clamp(min=2.0**-126)
    return lengths(scaled @ image) * most


def lengths(column: Tensor) -> Tensor:
    """Return the norms of columns, of shape (..., 1, 1)."""
    return column.square().sum(-2, keepdim=True).sqrt()


def fit_factor(factor: Tensor, a: Tensor, b: Tensor, step: float) -> Tensor:
    """Return Q_L after one update, from the matrices A and B."""
    if is_diagonal(factor, a):
        one, other = a.square().sum(-1), b.square().sum(-1)
        change = (one - other) * factor / largest(one + other, is_vector=True).clamp(min=2.0**-126)
        return add(factor, change, step)
    one, other = a @ a.mT, b @ b.mT
    change = (one - other).triu() / norm_lower_bound(one + other).clamp(min=2.0**-126)
    return add(factor, change @ factor, step)


def fit_factors(
    update: Tensor, left: Tensor, right: Tensor, counter: Tensor, c: KronCoefficients
) -> tuple[Tensor, Tensor]:
    """Return Q_L and Q_R after an update with one gradient."""
    if update.size(-2) == 0 or update.size(-1) == 0:
        return left, right
    draws = normal_like(update, counter)
    gradient = update + (2.0**-11.5 * update.abs().mean((-2, -1), keepdim=True)) * draws
    a = product(right, product(left, gradient).mT).mT
    b = solve_transposed(right, solve_transposed(left, draws).mT).mT
    return fit_factor(left, a, b, c.precond_step), fit_factor(right, a.mT, b.mT, c.precond_step)


def balance_factors(left: Tensor, right: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both factors to the same largest element, without a change of their product."""
    if matrix.size(-2) == 0 or matrix.size(-1) == 0:
        return left, right
    vectors = is_diagonal(left, matrix), is_diagonal(right, matrix)
    of_left, of_right = largest(left, vectors[0]), largest(right, vectors[1])
    batch = matrix.shape[:-2]
    mean = (of_left.reshape(batch) * of_right.reshape(batch)).sqrt()
    return left * (mean.reshape(of_left.shape) / of_left), right * (
        mean.reshape(of_right.shape) / of_right
    )


def next_factors(update: Tensor, state: KronState, c: KronCoefficients) -> tuple[Tensor, Tensor]:
    """Return the factors of this step: fitted, or unchanged."""
    left, right = state.left, state.right
    if isinstance(c.update, Tensor):
        # torch.func or a compiler hides the step count.
        even = balance_factors(left, right, update)
        start = [torch.where(c.balance, *pair) for pair in zip(even, (left, right), strict=True)]
        new = fit_factors(update, start[0], start[1], state.counter, c)
        return torch.where(c.update, new[0], left), torch.where(c.update, new[1], right)
    if c.balance:
        left, right = balance_factors(left, right, update)
    if c.update:
        left, right = fit_factors(update, left, right, state.counter, c)
    return left, right


def kron_rule(
    param: Tensor, grad: Tensor, state: KronState, c: KronCoefficients
) -> tuple[Tensor, KronState]:
    wide = widen(grad).contiguous()  # rounding of products depends on strides
    exp_avg = lerp(state.exp_avg, wide, c.weight)
    update = div(exp_avg, c.correction)
    known = (update if c.of_momentum else wide).detach()
    left, right = next_factors(known, state, c)
    half = product(right, product(left, update).mT)
    direction = transposed_product(left, transposed_product(right, half).mT)
    rms = direction.square().mean((-2, -1), keepdim=True).sqrt()
    direction = direction * (c.max_update_rms / (rms + 1e-12)).clamp(max=1.0)
    new = add(param, direction, c.step_size).to(param.dtype)
    return new, KronState(exp_avg, left, right, state.counter + 1)


KRON = Rule(
    name="kron",
    hyper=KronHyper,
    state=KronState,
    init=kron_init,
    state_depends_on=("max_size_triangular", "memory_save_mode"),
    coefficients=kron_coefficients,
    rule=kron_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("beta", BELOW_ONE),
        ("precond_lr", FINITE_NON_NEGATIVE),
        ("precond_init_scale", FINITE_POSITIVE),
        ("max_update_rms", NON_NEGATIVE),
        ("update_probability", UNIT),
        ("min_update_probability", UNIT),
        ("update_decay", FINITE_NON_NEGATIVE),
        ("flat_start", Interval(low=0)),
        ("max_size_triangular", Interval(low=0)),
        ("seed", Interval(low=0, high=2**31 - 1)),
    ),
    check=kron_check,
    kind="per_matrix",
    flops=kron_flops,
    stacked=True,
)


@constructor
def kron(
    lr: Scalar = 3e-4,
    beta: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    *,
    precond_lr: Scalar = 0.1,
    precond_init_scale: Scalar = 1.0,
    max_update_rms: Scalar = 1.1,
    update_probability: Scalar = 1.0,
    min_update_probability: Scalar = 0.03,
    update_decay: Scalar = 0.001,
    flat_start: int = 500,
    momentum_into_precond_update: bool = True,
    max_size_triangular: int = 8192,
    memory_save_mode: str | None = None,
    seed: int = 0,
    maximize: bool = False,
) -> Optimizer:
    """PSGD-Kron: momentum preconditioned by a Kronecker product that is fitted while it trains.

    ``p = (1 - lr * weight_decay) * p - lr * s * Q_L^T Q_L u Q_R^T Q_R``, where ``u`` is the
    bias-corrected average of gradients, and ``s`` bounds the root mean square of the step. Steps
    fit the triangular factors so that preconditioned gradients have covariance 1. No inverse, root
    or eigenvalue of a matrix is computed.

    State: for a matrix of m rows and n columns ``m n + m^2 + n^2`` numbers, where a diagonal factor
    has m or n instead of its square; and a counter. Cost: about ``4 m n (m + n)`` multiplications
    for each step, and twice that for a step that fits the factors.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        beta: decay of the average of gradients, in [0, 1).
        weight_decay: coefficient of the decoupled decay, >= 0.
        precond_lr: step size of the factors, a finite number >= 0.
        precond_init_scale: product of both factors before the first step, a finite number > 0.
        max_update_rms: largest root mean square of a step divided by ``lr``, >= 0.
        update_probability: part of the steps that fit the factors at first, in [0, 1].
        min_update_probability: least part of the steps that fit the factors, in [0, 1].
        update_decay: rate per step at which that part falls, a finite number >= 0; with 0 it stays
            ``update_probability``.
        flat_start: number of steps before that part falls, a whole number >= 0.
        momentum_into_precond_update: fit the factors to ``u``; otherwise, to the gradient.
        max_size_triangular: largest side, a whole number >= 0, with a triangular factor; a longer
            side, and a side of one element, have a diagonal factor.
        memory_save_mode: which other sides have a diagonal factor: None for none, "one_diag" for
            the longer side, "smart_one_diag" for the longer side unless both are equal, "all_diag"
            for both.
        seed: seed of the random numbers, a whole number >= 0. Parameters of one shape with one seed
            get the same numbers.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its random numbers are a function of a counter in
        the state, so a run can be repeated and resumed, and no generator is used. It needs whole
        tensors (``kind="per_matrix"``), and they are real matrices: its ``init`` raises ValueError
        for a parameter of another number of dimensions. The factors are constants for a derivative
        through a step. torch has no such class.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = kron(lr=0.1)
        >>> weight = torch.ones(2, 3)
        >>> state = optimizer.init(weight)
        >>> for _ in range(30):
        ...     weight, state = optimizer.update(weight, weight, state)  # of |p|^2 / 2
        >>> bool(weight.norm() < 0.5)
        True

    Reference:
        Li, "Preconditioned stochastic gradient descent", IEEE TNNLS 29(5), 2018; Li, "Black box Lie
        group preconditioners for SGD", arXiv 2211.04422, 2022. Defaults are those of kron-torch.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        KRON(
            lr=lr,
            beta=beta,
            precond_lr=precond_lr,
            precond_init_scale=precond_init_scale,
            max_update_rms=max_update_rms,
            update_probability=update_probability,
            min_update_probability=min_update_probability,
            update_decay=update_decay,
            flat_start=flat_start,
            momentum_into_precond_update=momentum_into_precond_update,
            max_size_triangular=max_size_triangular,
            memory_save_mode=memory_save_mode,
            seed=seed,
        ),
    )
