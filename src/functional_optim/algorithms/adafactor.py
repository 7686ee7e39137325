"""Adafactor: Shazeer & Stern 2018, algorithm 4, as torch.optim.Adafactor has it.

    b_t = 1 - t^c
    rho_t = min(lr, 1 / sqrt(t)),   alpha_t = max(eps2, RMS(p_{t-1})) * rho_t
    R_t = b_t * R_{t-1} + (1 - b_t) * mean of g_t^2 over each row
    C_t = b_t * C_{t-1} + (1 - b_t) * mean of g_t^2 over each column
    V_t = R_t C_t / max(mean of R_t, eps1)
    U_t = g_t / sqrt(max(V_t, eps1^2))
    p_t = (1 - lr * lambda) * p_{t-1} - alpha_t * U_t / max(1, RMS(U_t) / d)

A parameter with fewer than two dimensions keeps V_t = b_t * V_{t-1} + (1 - b_t) * g_t^2. In more
dimensions rows and columns are those of the last two. As in torch.optim, lr replaces the 0.01 of
the paper, and eps1 bounds the estimate, where the paper adds eps1 to g_t^2.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.core.aliasing import match_strides
from functional_optim.core.hyper import OPTIONAL, Scalar
from functional_optim.core.scalars import product_in, quotient_in, scalar_dtype
from functional_optim.numeric import above, add, clamp, div, lerp, mul, number, smaller


class AdafactorState(NamedTuple):
    # For a parameter of shape (..., m, n), all in its dtype.
    row_var: list[Tensor]  # [R], (..., m, 1); [] with fewer than two dimensions
    col_var: list[Tensor]  # [C], (..., 1, n); [] with fewer than two dimensions
    variance: list[Tensor]  # [V], of the parameter's shape; [] with two dimensions or more


class AdafactorHyper(NamedTuple):
    lr: float  # learning rate, the largest relative step
    beta2_decay: float  # c
    eps: tuple[OPTIONAL, float]  # eps1 (None: that of the parameter's dtype) and eps2
    d: float  # the largest RMS of a direction
    weight_decay: float  # lambda


class AdafactorCoefficients(NamedTuple):
    weight: float  # t^c
    rho: float
    rho_dtype: str  # dtype of rho if it is a tensor lr, as in torch.optim.Adafactor; else "float64"
    eps_1: float
    uses_dtype: bool  # True if eps1 is the eps of the parameter's dtype, and not eps_1
    eps_2: float
    d: float
    decay: float  # 1 - lr * lambda


def adafactor_init(param: Tensor, hyper: AdafactorHyper) -> AdafactorState:
    if param.dim() < 2:
        return AdafactorState([], [], [torch.zeros_like(param)])
    *rest, rows, columns = param.shape
    row_var, col_var = param.new_zeros((*rest, rows, 1)), param.new_zeros((*rest, 1, columns))
    return AdafactorState([row_var], [col_var], [])


def relative_step(step: float, lr: float) -> tuple[float, str]:
    """Return the smaller of the learning rate and 1 / sqrt(step), and its dtype."""
    relative = 1 / (step**0.5)
    if isinstance(lr, Tensor) and not isinstance(step, Tensor):
        chosen: Any = smaller(lr, relative)
        return chosen, scalar_dtype(chosen)
    return above(lr, relative, relative, lr), "float64"


def adafactor_coefficients(step: float, hyper: AdafactorHyper) -> AdafactorCoefficients:
    eps_1, eps_2 = hyper.eps
    rho, rho_dtype = relative_step(step, hyper.lr)
    return AdafactorCoefficients(
        step**hyper.beta2_decay,
        rho,
        rho_dtype,
        0.0 if eps_1 is None else eps_1,
        eps_1 is None,
        eps_2,
        hyper.d,
        1 - hyper.lr * hyper.weight_decay,
    )


def smallest_difference(x: Tensor) -> float:
    """Return the distance from 1 to the next larger number of the dtype."""
    if x.dtype == torch.float64:
        return 2.0**-52
    if x.dtype == torch.float32:
        return 2.0**-23
    return 2.0**-7 if x.dtype == torch.bfloat16 else 2.0**-10


def root_mean_square(x: Tensor, divisor: float) -> float:
    """Return the root mean square of a tensor, divided by a number."""
    root: float = max(x.numel(), 1) ** 0.5
    return number(torch.linalg.vector_norm(x)) / (root * divisor)


def adafactor_variance(
    grad: Tensor, state: AdafactorState, weight: float, eps_1: float
) -> tuple[Tensor, AdafactorState]:
    """Return the estimate of the squared gradient, and the new state."""
    if grad.dim() < 2:
        variance = lerp(state.variance[0], grad * grad, weight)
        return variance, AdafactorState([], [], [variance])
    rows = torch.linalg.vector_norm(grad, dim=[-1], keepdim=True).square()
    columns = torch.linalg.vector_norm(grad, dim=[-2], keepdim=True).square()
    row_var = lerp(state.row_var[0], div(rows, float(grad.size(-1))), weight)
    col_var = lerp(state.col_var[0], div(columns, float(grad.size(-2))), weight)
    mean = row_var.mean(dim=[-2], keepdim=True)
    variance = (row_var * col_var) / clamp(mean, eps_1, torch.inf)
    return variance, AdafactorState([row_var], [col_var], [])


def adafactor_rule(
    param: Tensor, grad: Tensor, state: AdafactorState, c: AdafactorCoefficients
) -> tuple[Tensor, AdafactorState]:
    eps_1 = smallest_difference(param) if c.uses_dtype else c.eps_1
    size = root_mean_square(param, 1.0)
    alpha = product_in(c.rho, above(size, c.eps_2, size, c.eps_2), c.rho_dtype)
    variance, state = adafactor_variance(grad, state, c.weight, eps_1)
    direction = clamp(variance, eps_1 * eps_1, torch.inf).rsqrt() * grad
    length = root_mean_square(direction, c.d)
    shrunk = match_strides(mul(param, c.decay), param)
    step_size = quotient_in(-alpha, above(length, 1.0, length, 1.0), c.rho_dtype)
    return add(shrunk, direction, step_size), state


ADAFACTOR = Rule(
    name="adafactor",
    hyper=AdafactorHyper,
    state=AdafactorState,
    init=adafactor_init,
    state_depends_on=(),
    coefficients=adafactor_coefficients,
    rule=adafactor_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("beta2_decay", Interval(high=0.0)),
        ("eps", NON_NEGATIVE),
        ("d", Interval(low=1.0)),
        ("weight_decay", NON_NEGATIVE),
    ),
    kind="per_matrix",
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
)


@constructor
def adafactor(
    lr: Scalar = 1e-2,
    beta2_decay: Scalar = -0.8,
    eps: tuple[Scalar | None, Scalar] = (None, 1e-3),
    d: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Adafactor: steps scaled by a second average that is kept as one row and one column.

    ``p = p - alpha * u / max(1, RMS(u) / d)`` with ``u = g / sqrt(V)``, where ``V`` is the product
    of the averages of ``g^2`` over rows and over columns, and ``alpha`` is the root mean square of
    ``p`` times ``min(lr, 1 / sqrt(t))``.

    Args:
        lr: the largest step, relative to the size of the parameter, a finite number >= 0. Any
            number may be a 0-d tensor or a schedule.
        beta2_decay: the averages are weighted by ``1 - t^beta2_decay``, <= 0.
        eps: ``(eps1, eps2)``, each >= 0. ``eps1`` bounds the root of ``V`` from below; None is the
            distance from 1 to the next number of the parameter's dtype. ``eps2`` is the least size
            of a parameter that a step is relative to.
        d: the largest root mean square of a direction, >= 1.
        weight_decay: coefficient of the decoupled decay, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Adafactor(foreach=False).
        Its state is ``m + n`` numbers for a matrix of shape ``(m, n)``, and one number for each
        element of a vector. It needs whole tensors (``kind="per_matrix"``), and takes no complex
        ones. It reads two norms of each parameter, so each step waits for the device. An empty
        parameter stays empty, where torch.optim.Adafactor raises ZeroDivisionError. With ``eps1``
        None each parameter has the bound of its own dtype. In torch.optim all parameters of a group
        have the bound of the first one that is stepped.

    Example::

        >>> import torch
        >>> optimizer = adafactor(lr=0.1)
        >>> weight, grad = torch.ones(2, 2), torch.tensor([[3.0, 3.0], [-1.0, -1.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight
        tensor([[0.9000, 0.9000],
                [1.1000, 1.1000]])

    Reference:
        Shazeer & Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018,
        algorithm 4; ``lr``, the use of ``eps1``, the decay and the defaults are those of
        torch.optim.Adafactor.
    """
    return chain(
        maximized(maximize),
        ADAFACTOR(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay),
    )
