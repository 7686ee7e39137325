"""Adagrad: Duchi, Hazan & Singer 2011, in the form of torch.optim.Adagrad.

s_t = s_{t-1} + g_t^2                        (s_0 = initial_accumulator_value)
p_t = p_{t-1} - lr / (1 + (t - 1) * lr_decay) * g_t / (sqrt(s_t) + eps)
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.hyper import Scalar
from functional_optim.numeric import addcdiv, addcmul, fill_like, shift
from functional_optim.optimizer import Optimizer, chain
from functional_optim.stage import Rule, rows_of_sparse
from functional_optim.transforms.maximize import maximized
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class AdagradState(NamedTuple):
    sum: Tensor  # s, of the parameter's shape and dtype


class AdagradHyper(NamedTuple):
    lr: float  # learning rate
    lr_decay: float
    initial_accumulator_value: float  # s_0
    eps: float


class AdagradCoefficients(NamedTuple):
    eps: float
    step_size: float  # -lr / (1 + (t - 1) * lr_decay)


def adagrad_init(param: Tensor, hyper: AdagradHyper) -> AdagradState:
    return AdagradState(fill_like(param, hyper.initial_accumulator_value))


def adagrad_coefficients(step: float, hyper: AdagradHyper) -> AdagradCoefficients:
    return AdagradCoefficients(hyper.eps, -(hyper.lr / (1 + (step - 1) * hyper.lr_decay)))


def adagrad_rule(
    param: Tensor, grad: Tensor, state: AdagradState, c: AdagradCoefficients
) -> tuple[Tensor, AdagradState]:
    total = addcmul(state.sum, grad, grad, 1.0)
    return addcdiv(param, grad, shift(total.sqrt(), c.eps), c.step_size), AdagradState(total)


ADAGRAD = Rule(
    name="adagrad",
    hyper=AdagradHyper,
    state=AdagradState,
    init=adagrad_init,
    coefficients=adagrad_coefficients,
    rule=adagrad_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("lr_decay", NON_NEGATIVE),
        ("initial_accumulator_value", NON_NEGATIVE),
        ("eps", NON_NEGATIVE),
    ),
    sparse=rows_of_sparse,
)


def adagrad(
    lr: Scalar = 1e-2,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-10,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Adagrad: steps divided by the root of the sum of all squared gradients so far.

    ``s = s + g^2``, then ``p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)``.

    Args:
        lr: learning rate, a finite number >= 0; like every number here, it may
            be a 0-d tensor or a schedule.
        lr_decay: how fast the learning rate falls with the step, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        initial_accumulator_value: the sum before the first step, >= 0.
        eps: added to the root, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Adagrad(foreach=False) on
        dense gradients. Sparse gradients touch only the rows they store.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = adagrad(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic
        optimization", JMLR 12, 2011, eq. 1 with the diagonal matrix.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        ADAGRAD(
            lr=lr,
            lr_decay=lr_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        ),
    )
