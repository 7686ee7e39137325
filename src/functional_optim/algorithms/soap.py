"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner; Vyas et al. 2024, algorithm 3.

    m_t = b1 * m_{t-1} + (1 - b1) * G_t
    v_t = b2 * v_{t-1} + (1 - b2) * (Q_L^T G_t Q_R)^2
    N_t = Q_L^T m_t Q_R / (sqrt(v_t) / sqrt(1 - b2^n) + eps)
    p_t = (1 - lr * lambda) * p_{t-1} - lr / (1 - b1^n) * Q_L N_t Q_R^T
    L_t = bs * L_{t-1} + (1 - bs) * G_t G_t^T,     R_t = bs * R_{t-1} + (1 - bs) * G_t^T G_t

As in the authors' program, the first step only computes the basis, the eigenvectors of L_1 and R_1.
So no gradient is rotated by a basis of itself alone, and step t is Adam's step n = t - 1. After
each of Adam's steps whose number is a multiple of k, one step of the power method refreshes the
basis: its columns are sorted by q^T L q, v with them, and then Q becomes the orthogonal factor (QR)
of L Q.

Here eps is added as in Adam, after the bias correction; the authors' program adds it before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import adam_denominator
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.core.links import rebuild
from functional_optim.core.matrices import product_flops, qr_flops, require_matrix, symmetric_eigen
from functional_optim.numeric import add, addcmul, at_first_step, lerp, mul
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class SoapState(NamedTuple):
    # For a parameter of shape (m, n), all in its dtype, or in float32 if that has 16 bits.
    exp_avg: Tensor  # M, (m, n)
    exp_avg_sq: Tensor  # v, (m, n), in the basis
    left: list[Tensor]  # [L], (m, m); [] if m > max_precond_dim
    right: list[Tensor]  # [R], (n, n); [] if n > max_precond_dim
    left_basis: list[Tensor]  # [Q_L], (m, m); [] if left is []
    right_basis: list[Tensor]  # [Q_R], (n, n); [] if right is []


class SoapHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    shampoo_beta: float  # decay of L and R
    eps: float
    precondition_frequency: int  # k
    max_precond_dim: int  # a longer side has no basis


class SoapCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    weight: float  # 1 - bs
    root: float  # sqrt(1 - b2^n)
    eps: float
    step_size: float  # -lr / (1 - b1^n)
    first: bool  # True if this step computes the bases, and nothing else
    refresh: bool  # True if this step refreshes the bases


def soap_init(param: Tensor, hyper: SoapHyper) -> SoapState:
    require_matrix("soap", param)
    zero = widen(torch.zeros_like(param))
    left, right = (
        [zero.new_zeros(size, size)] if size <= hyper.max_precond_dim else []
        for size in param.shape
    )
    bases = [
        [torch.eye(len(one), dtype=one.dtype, device=one.device) for one in side]
        for side in (left, right)
    ]
    return SoapState(zero, torch.zeros_like(zero), left, right, *bases)


def basis_flops(
    shape: tuple[int, ...], largest: int, products: int, in_refresh: int, frequency: int
) -> int:
    """Return the floating-point operations of a step in a basis of sides up to ``largest``.

    In each step, every side multiplies the matrix ``products`` times by a square matrix. A refresh
    has a QR and ``in_refresh`` products of square matrices.
    """
    total = 0
    for side, other in (shape, shape[::-1]):
        if side <= largest:
            total += products * product_flops(side, side, other)
            refresh = in_refresh * product_flops(side, side, side) + qr_flops(side, side)
            total += refresh // frequency
    return total


def soap_flops(shape: tuple[int, ...], hyper: SoapHyper) -> int:
    return basis_flops(shape, hyper.max_precond_dim, 4, 2, hyper.precondition_frequency)


def soap_coefficients(step: float, hyper: SoapHyper) -> SoapCoefficients:
    beta_1, beta_2 = hyper.betas
    adam_step = step - 1.0
    count = at_first_step(step, 1.0, adam_step)
    return SoapCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        1 - hyper.shampoo_beta,
        (1 - beta_2**count) ** 0.5,
        hyper.eps,
        -(hyper.lr / (1 - beta_1**count)),
        adam_step == 0.0,
        adam_step % float(hyper.precondition_frequency) == 0.0,
    )


def widen(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least, for averages and factors that need its digits."""
    return x.to(torch.float32) if x.element_size() < 4 else x


def to_basis(x: Tensor, left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return ``Q_L^T x Q_R``, without a factor for a side that has no basis."""
    for basis in left:
        x = basis.mT @ x
    for basis in right:
        x = x @ basis
    return x


def from_basis(x: Tensor, left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return ``Q_L x Q_R^T``."""
    for basis in left:
        x = basis @ x
    for basis in right:
        x = x @ basis.mT
    return x


def eigenbasis(factor: Tensor) -> Tensor:
    """Return the eigenvectors, in descending order of the eigenvalues."""
    return symmetric_eigen(factor)[1].flip(-1)


def refresh(factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis after one step of the power method, and the new order of its columns."""
    known = factor.detach()
    sizes = (basis * (known @ basis)).sum(-2)
    order = torch.argsort(sizes, dim=-1, descending=True, stable=True)
    columns = basis.gather(-1, order.unsqueeze(-2).expand(basis.shape))
    return torch.linalg.qr(known @ columns)[0], order


def soap_bases(state: SoapState, c: SoapCoefficients) -> SoapState:
    """Return the state with new bases at the first step, with refreshed bases, or unchanged."""
    if isinstance(c.first, Tensor):
        return soap_bases_hidden_step(state, c)
    if not c.first and not c.refresh:
        return state
    square, left, right = state.exp_avg_sq, state.left_basis, state.right_basis
    if c.first:
        left = [eigenbasis(one) for one in state.left]
        right = [eigenbasis(one) for one in state.right]
    else:
        for one in state.left:
            basis, order = refresh(one, left[0])
            square = square.gather(-2, order.unsqueeze(-1).expand(square.shape))
            left = [basis]
        for one in state.right:
            basis, order = refresh(one, right[0])
            square = square.gather(-1, order.unsqueeze(-2).expand(square.shape))
            right = [basis]
    return SoapState(state.exp_avg, square, state.left, state.right, left, right)


def soap_bases_hidden_step(state: SoapState, c: SoapCoefficients) -> SoapState:
    """Compute all cases and select one: torch.func or a compiler hides the step count."""
    is_first, refreshes = torch.as_tensor(c.first), torch.as_tensor(c.refresh)
    first = soap_bases(state, c._replace(first=True))
    later = soap_bases(state, c._replace(first=False, refresh=True))

    def select(new: Tensor, fresh: Tensor, old: Tensor) -> Tensor:
        return torch.where(is_first, new, torch.where(refreshes, fresh, old))

    return state._replace(
        exp_avg_sq=select(first.exp_avg_sq, later.exp_avg_sq, state.exp_avg_sq),
        left_basis=list(map(select, first.left_basis, later.left_basis, state.left_basis)),
        right_basis=list(map(select, first.right_basis, later.right_basis, state.right_basis)),
    )


def soap_step(
    param: Tensor, grad: Tensor, state: SoapState, c: SoapCoefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter and both averages after a step of Adam in the basis."""
    left, right = state.left_basis, state.right_basis
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    rotated = to_basis(grad, left, right)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), rotated, rotated, c.weight_2)
    denominator = adam_denominator(exp_avg_sq, c.root, c.eps)
    direction = from_basis(to_basis(exp_avg, left, right) / denominator, left, right)
    return add(param, direction, c.step_size).to(param.dtype), exp_avg, exp_avg_sq


def soap_rule(
    param: Tensor, grad: Tensor, state: SoapState, c: SoapCoefficients
) -> tuple[Tensor, SoapState]:
    wide = widen(grad).contiguous()  # rounding of products depends on strides
    exp_avg, exp_avg_sq = state.exp_avg, state.exp_avg_sq
    if isinstance(c.first, Tensor):
        stepped = soap_step(param, wide, state, c)
        param = torch.where(c.first, param, stepped[0])
        exp_avg = torch.where(c.first, exp_avg, stepped[1])
        exp_avg_sq = torch.where(c.first, exp_avg_sq, stepped[2])
    elif not c.first:
        param, exp_avg, exp_avg_sq = soap_step(param, wide, state, c)
    left = [lerp(one, wide @ wide.mT, c.weight) for one in state.left]
    right = [lerp(one, wide.mT @ wide, c.weight) for one in state.right]
    new = SoapState(exp_avg, exp_avg_sq, left, right, state.left_basis, state.right_basis)
    return param, soap_bases(new, c)


SOAP = Rule(
    name="soap",
    hyper=SoapHyper,
    state=SoapState,
    init=soap_init,
    state_depends_on=("max_precond_dim",),
    coefficients=soap_coefficients,
    rule=soap_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("shampoo_beta", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("precondition_frequency", Interval(low=1)),
        ("max_precond_dim", NON_NEGATIVE),
    ),
    kind="per_matrix",
    flops=soap_flops,
    stacked=True,
)


@constructor
def soap(
    lr: Scalar = 3e-3,
    betas: tuple[Scalar, Scalar] = (0.95, 0.95),
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
) -> Optimizer:
    """SOAP: Adam on gradients that are rotated to the eigenbasis of Shampoo's preconditioner.

    ``p = p - lr * Q_L (m_hat / (sqrt(v_hat) + eps)) Q_R^T``, with Adam's averages of the rotated
    gradient ``Q_L^T g Q_R``. The columns of ``Q_L`` and ``Q_R`` approximate the eigenvectors of the
    averages of ``g g^T`` and ``g^T g``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        shampoo_beta: decay of the averages of ``g g^T`` and ``g^T g``, in [0, 1); None for
            ``betas[1]``.
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        precondition_frequency: number of steps between two refreshes of the basis, a whole number
            >= 1.
        max_precond_dim: largest side with a basis, a whole number >= 0. A longer side has no basis
            and costs no memory; with 0, this is AdamW from the second step on.

    Returns:
        An :class:`~functional_optim.Optimizer`. The first step computes the basis, and changes
        parameters only by the decay. It needs whole tensors (``kind="per_matrix"``), and they are
        real matrices: its ``init`` raises ValueError for a parameter of another number of
        dimensions. If an eigenvalue is repeated, such as the 0 of a side that is longer than the
        other, rounding determines the eigenvectors, so results differ between machines. The basis
        is a constant for a derivative through a step. If torch.func or a compiler hides the step
        count, each step computes all cases. torch has no such class.

    Example::

        >>> import torch
        >>> optimizer = soap(lr=0.1, weight_decay=0.0)
        >>> weight, grad = torch.zeros(2, 2), torch.tensor([[0.0, 3.0], [2.0, 0.0]])
        >>> state = optimizer.init(weight)
        >>> for _ in range(2):
        ...     weight, state = optimizer.update(weight, grad, state)
        >>> weight.abs() < 1e-6
        tensor([[ True, False],
                [False,  True]])

    Reference:
        Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", ICLR 2025,
        arXiv 2409.11321, algorithm 3.
    """
    rule = SOAP(
        lr=lr,
        betas=betas,
        shampoo_beta=0.0 if shampoo_beta is None else shampoo_beta,
        eps=eps,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
    )
    if shampoo_beta is None:
        rule = rebuild(rule, shampoo_beta=rule.hyper.betas[1])
    return chain(decoupled_weight_decay(weight_decay), rule)
