"""KL-SOAP: SOAP whose factors minimise a Kullback-Leibler divergence; Lin et al. 2025.

    m_t = b1 * m_{t-1} + (1 - b1) * G_t
    v_t = b2 * v_{t-1} + (1 - b2) * (Q_L^T G_t Q_R)^2
    p_t = (1 - lr * lambda) * p_{t-1} - lr * Q_L (Q_L^T m_t Q_R / (sqrt(v_t) + eps)) Q_R^T
    L_t = bs * L_{t-1} + (1 - bs) / n * G_t Q_R diag(1 / r_{t-1}) Q_R^T G_t^T
    R_t = bs * R_{t-1} + (1 - bs) / m * G_t^T Q_L diag(1 / l_{t-1}) Q_L^T G_t
    l_t = bs * l_{t-1} + (1 - bs) * mean over columns of (Q_L^T G_t Q_R)^2 / r_{t-1}
    r_t = bs * r_{t-1} + (1 - bs) * mean over rows of (Q_L^T G_t Q_R)^2 / l_{t-1}

for a parameter of shape (m, n). Each factor is an average of gradients that are preconditioned by
the inverse of the other factor, where SOAP averages G G^T and G^T G. The vectors l and r estimate
the eigenvalues of L and R. They start at ``initial_eigenvalue``, and 1 / sqrt(l) is at most
c = max(10, min(m, ``max_inverse_root``)). A side without a basis has eigenvalues 1.

As in SOAP, the first step only computes the bases: the eigenvectors of L_1 and R_1, which are
computed with eigenvalues 1. After each of Adam's steps whose number is a multiple of k, each basis
is refreshed: Q_L becomes the orthogonal factor (QR) of L Q_L. Columns are not sorted, unlike those
of SOAP. The bias of Adam's averages is corrected only with ``correct_bias``.

The formulas are those of the authors' program, github.com/yorkerlin/KL-Methods, and so are the
defaults. It applies the decay after the step; here it comes first, as in SOAP.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import (
    SoapCoefficients,
    SoapState,
    basis_flops,
    eigenbasis,
    soap_step,
    to_basis,
    widen,
)
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor
from functional_optim.bounds import (
    BELOW_ONE,
    FINITE_NON_NEGATIVE,
    FINITE_POSITIVE,
    NON_NEGATIVE,
    Interval,
)
from functional_optim.core.links import rebuild
from functional_optim.core.matrices import require_matrix
from functional_optim.numeric import at_first_step, fill_like, lerp
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class KLSoapState(NamedTuple):
    # For a parameter of shape (m, n), all in its dtype, or in float32 if that has 16 bits.
    exp_avg: Tensor  # m, (m, n)
    exp_avg_sq: Tensor  # v, (m, n), in the basis
    left: list[Tensor]  # [L], (m, m); [] if m > max_precond_dim
    right: list[Tensor]  # [R], (n, n); [] if n > max_precond_dim
    left_basis: list[Tensor]  # [Q_L], (m, m); [] if left is []
    right_basis: list[Tensor]  # [Q_R], (n, n); [] if right is []
    left_values: list[Tensor]  # [l], (m,); [] if left is []
    right_values: list[Tensor]  # [r], (n,); [] if right is []


class KLSoapHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    shampoo_beta: float  # decay of L, R, l and r
    eps: float
    initial_eigenvalue: float  # l and r before the first step
    precondition_frequency: int  # k
    max_precond_dim: int  # a longer side has no basis
    max_inverse_root: int  # largest 1 / sqrt(l), for sides with at least as many elements
    correct_bias: bool


class KLSoapCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    weight: float  # 1 - bs
    root: float  # sqrt(1 - b2^n), or 1 without correction of the bias
    eps: float
    step_size: float  # -lr / (1 - b1^n), or -lr
    max_inverse_root: int
    first: bool  # True if this step computes the bases, and nothing else
    refresh: bool  # True if this step refreshes the bases


def kl_soap_init(param: Tensor, hyper: KLSoapHyper) -> KLSoapState:
    require_matrix("kl_soap", param)
    zero = widen(torch.zeros_like(param))
    sizes = [[size] if size <= hyper.max_precond_dim else [] for size in param.shape]
    factors = [[zero.new_zeros(size, size) for size in side] for side in sizes]
    bases = [
        [torch.eye(size, dtype=zero.dtype, device=zero.device) for size in side] for side in sizes
    ]
    values = [
        [fill_like(zero.new_zeros(size), hyper.initial_eigenvalue) for size in side]
        for side in sizes
    ]
    return KLSoapState(zero, torch.zeros_like(zero), *factors, *bases, *values)


def kl_soap_flops(shape: tuple[int, ...], hyper: KLSoapHyper) -> int:
    return basis_flops(shape, hyper.max_precond_dim, 6, 1, hyper.precondition_frequency)


def kl_soap_coefficients(step: float, hyper: KLSoapHyper) -> KLSoapCoefficients:
    beta_1, beta_2 = hyper.betas
    adam_step = step - 1.0
    count = at_first_step(step, 1.0, adam_step)
    root, step_size = 1.0, -hyper.lr
    if hyper.correct_bias:
        root, step_size = (1 - beta_2**count) ** 0.5, -(hyper.lr / (1 - beta_1**count))
    return KLSoapCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        1 - hyper.shampoo_beta,
        root,
        hyper.eps,
        step_size,
        hyper.max_inverse_root,
        adam_step == 0.0,
        adam_step % float(hyper.precondition_frequency) == 0.0,
    )


def first_bases(grad: Tensor, state: KLSoapState, c: KLSoapCoefficients) -> KLSoapState:
    """Return the state after the first step, which computes the bases."""
    rows, columns = max(1, grad.size(-2)), max(1, grad.size(-1))
    left = [lerp(one, grad @ grad.mT / columns, c.weight) for one in state.left]
    right = [lerp(one, grad.mT @ grad / rows, c.weight) for one in state.right]
    return KLSoapState(
        state.exp_avg,
        state.exp_avg_sq,
        left,
        right,
        [eigenbasis(one) for one in left],
        [eigenbasis(one) for one in right],
        state.left_values,
        state.right_values,
    )


def update_eigenvalues(values: Tensor, mean: Tensor, c: KLSoapCoefficients) -> Tensor:
    """Return the updated average of eigenvalues, bounded from below."""
    most = float(max(10, min(values.size(-1), c.max_inverse_root)))
    return lerp(values, mean, c.weight).clamp(min=most**-2)


def refresh_basis(factor: Tensor, basis: Tensor, c: KLSoapCoefficients) -> Tensor:
    """Return the basis after a step of the power method if this step refreshes, else the basis."""
    if isinstance(c.refresh, Tensor):
        return torch.where(c.refresh, orthogonal_factor(factor, basis), basis)
    if not c.refresh:
        return basis
    return orthogonal_factor(factor, basis)


def orthogonal_factor(factor: Tensor, basis: Tensor) -> Tensor:
    """Return Q of the QR decomposition of ``factor @ basis``, with a constant factor."""
    orthogonal: Tensor = torch.linalg.qr(factor.detach() @ basis)[0]
    return orthogonal


def kl_soap_step(
    param: Tensor, grad: Tensor, state: KLSoapState, c: KLSoapCoefficients
) -> tuple[Tensor, KLSoapState]:
    """Return parameter and state after a step that is not the first."""
    left, right = state.left_basis, state.right_basis
    param, exp_avg, exp_avg_sq = soap_step(
        param,
        grad,
        SoapState(state.exp_avg, state.exp_avg_sq, state.left, state.right, left, right),
        SoapCoefficients(
            c.weight_1,
            c.beta_2,
            c.weight_2,
            c.weight,
            c.root,
            c.eps,
            c.step_size,
            c.first,
            c.refresh,
        ),
    )
    none: list[Tensor] = []
    rows, columns = max(1, grad.size(-2)), max(1, grad.size(-1))
    of_left, of_right = to_basis(grad, none, right), to_basis(grad, left, none)
    rotated = to_basis(grad, left, right)
    rotated_left, rotated_right = rotated, rotated
    for one in state.right_values:
        scale = one.sqrt().unsqueeze(-2)
        of_left, rotated_left = of_left / scale, rotated / scale
    for one in state.left_values:
        scale = one.sqrt().unsqueeze(-1)
        of_right, rotated_right = of_right / scale, rotated / scale
    factors_left = [lerp(one, of_left @ of_left.mT / columns, c.weight) for one in state.left]
    factors_right = [lerp(one, of_right.mT @ of_right / rows, c.weight) for one in state.right]
    return param, KLSoapState(
        exp_avg,
        exp_avg_sq,
        factors_left,
        factors_right,
        [refresh_basis(one, left[0], c) for one in factors_left],
        [refresh_basis(one, right[0], c) for one in factors_right],
        [
            update_eigenvalues(one, rotated_left.square().sum(-1) / columns, c)
            for one in state.left_values
        ],
        [
            update_eigenvalues(one, rotated_right.square().sum(-2) / rows, c)
            for one in state.right_values
        ],
    )


def kl_soap_rule(
    param: Tensor, grad: Tensor, state: KLSoapState, c: KLSoapCoefficients
) -> tuple[Tensor, KLSoapState]:
    wide = widen(grad).contiguous()  # rounding of products depends on strides
    if isinstance(c.first, Tensor):
        return kl_soap_hidden_step(param, wide, state, c)
    if c.first:
        return param, first_bases(wide, state, c)
    return kl_soap_step(param, wide, state, c)


def kl_soap_hidden_step(
    param: Tensor, grad: Tensor, state: KLSoapState, c: KLSoapCoefficients
) -> tuple[Tensor, KLSoapState]:
    """Compute both kinds of step and select one: torch.func or a compiler hides the step count."""
    start = first_bases(grad, state, c)
    new, later = kl_soap_step(param, grad, state, c)

    def select(one: Any, other: Any) -> Any:
        if isinstance(one, list):
            return list(map(select, one, other))
        return torch.where(torch.as_tensor(c.first), one, other)

    return select(param, new), KLSoapState(*map(select, start, later))


KL_SOAP = Rule(
    name="kl_soap",
    hyper=KLSoapHyper,
    state=KLSoapState,
    init=kl_soap_init,
    state_depends_on=("max_precond_dim",),
    coefficients=kl_soap_coefficients,
    rule=kl_soap_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("shampoo_beta", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("initial_eigenvalue", FINITE_POSITIVE),
        ("precondition_frequency", Interval(low=1)),
        ("max_precond_dim", NON_NEGATIVE),
        ("max_inverse_root", Interval(low=1)),
    ),
    kind="per_matrix",
    flops=kl_soap_flops,
    stacked=True,
)


@constructor
def kl_soap(
    lr: Scalar = 1e-4,
    betas: tuple[Scalar, Scalar] = (0.9, 0.98),
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    *,
    initial_eigenvalue: Scalar = 0.1,
    max_inverse_root: int = 4000,
    correct_bias: bool = False,
) -> Optimizer:
    """KL-SOAP: SOAP in a basis that is estimated by the Kullback-Leibler divergence.

    As in :func:`~functional_optim.soap`, Adam steps gradients in the eigenbasis of two factors.
    Here the factors are averages of ``g R^-1 g^T / n`` and ``g^T L^-1 g / m``, each preconditioned
    by the inverse of the other one.

    State: for a matrix of m rows and n columns ``2 (m n + m^2 + n^2) + m + n`` numbers. Cost: about
    twice the matrix products of :func:`~functional_optim.soap`, and the same decompositions.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of Adam's two averages, each in [0, 1).
        shampoo_beta: decay of the factors and of their eigenvalues, in [0, 1); None for
            ``betas[1]``.
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        precondition_frequency: number of steps between two refreshes of the basis, a whole number
            >= 1.
        max_precond_dim: largest side with a basis, a whole number >= 0. A longer side has no basis
            and costs no memory.
        initial_eigenvalue: estimate of all eigenvalues before the first step, a finite number > 0.
        max_inverse_root: a whole number M >= 1: the inverse root of an eigenvalue of a side with s
            elements is at most ``max(10, min(s, M))``.
        correct_bias: correct the bias of Adam's averages, as SOAP does. The authors do not.

    Returns:
        An :class:`~functional_optim.Optimizer`. The notes of :func:`~functional_optim.soap` on
        whole tensors, the first step, equal eigenvalues, and derivatives apply here too.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = kl_soap(lr=0.1, weight_decay=0.0)
        >>> weight, grad = torch.zeros(2, 2), torch.tensor([[0.0, 3.0], [2.0, 0.0]])
        >>> state = optimizer.init(weight)
        >>> for _ in range(2):
        ...     weight, state = optimizer.update(weight, grad, state)
        >>> weight.abs() < 1e-6
        tensor([[ True, False],
                [False,  True]])

    Reference:
        Lin, Lowe, Dangel, Eschenhagen, Xu, Grosse, "Understanding and improving Shampoo and SOAP
        via Kullback-Leibler minimization", ICLR 2026, arXiv 2509.03378.
    """
    rule = KL_SOAP(
        lr=lr,
        betas=betas,
        shampoo_beta=0.0 if shampoo_beta is None else shampoo_beta,
        eps=eps,
        initial_eigenvalue=initial_eigenvalue,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
        max_inverse_root=max_inverse_root,
        correct_bias=correct_bias,
    )
    if shampoo_beta is None:
        rule = rebuild(rule, shampoo_beta=rule.hyper.betas[1])
    return chain(decoupled_weight_decay(weight_decay), rule)
