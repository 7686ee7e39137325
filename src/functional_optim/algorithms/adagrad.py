"""Adagrad: Duchi, Hazan & Singer 2011, in the form of torch.optim.Adagrad.

s_t = s_{t-1} + g_t^2                        (s_0 = initial_accumulator_value)
p_t = p_{t-1} - lr / (1 + (t - 1) * lr_decay) * g_t / (sqrt(s_t) + eps)
"""

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.hyper import Scalar, is_zero
from functional_optim.core.stage import Rule, rows_of_sparse
from functional_optim.numeric import addcdiv, addcmul, fill_like, shift
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


def adagrad_init(param: Tensor, hyper: Any) -> AdagradState:
    return AdagradState(fill_like(param, hyper.initial_accumulator_value))


def adagrad_coefficients(step: float, hyper: AdagradHyper) -> AdagradCoefficients:
    return AdagradCoefficients(hyper.eps, -(hyper.lr / (1 + (step - 1) * hyper.lr_decay)))


def adagrad_rule(
    param: Tensor, grad: Tensor, state: AdagradState, c: AdagradCoefficients
) -> tuple[Tensor, AdagradState]:
    total = addcmul(state.sum, grad, grad, 1.0)
    return addcdiv(param, grad, shift(total.sqrt(), c.eps), c.step_size), AdagradState(total)


class AdagradRootHyper(NamedTuple):
    lr: float  # learning rate
    lr_decay: float
    initial_accumulator_value: float  # s_0
    eps: float
    eps_root: float  # e


class AdagradRootCoefficients(NamedTuple):
    eps: float
    step_size: float  # -lr / (1 + (t - 1) * lr_decay)
    eps_root: float  # e


def adagrad_root_coefficients(step: float, hyper: AdagradRootHyper) -> AdagradRootCoefficients:
    step_size = -(hyper.lr / (1 + (step - 1) * hyper.lr_decay))
    return AdagradRootCoefficients(hyper.eps, step_size, hyper.eps_root)


def adagrad_root_rule(
    param: Tensor, grad: Tensor, state: AdagradState, c: AdagradRootCoefficients
) -> tuple[Tensor, AdagradState]:
    total = addcmul(state.sum, grad, grad, 1.0)
    denominator = shift(shift(total, c.eps_root).sqrt(), c.eps)
    return addcdiv(param, grad, denominator, c.step_size), AdagradState(total)


ADAGRAD = Rule(
    name="adagrad",
    hyper=AdagradHyper,
    state=AdagradState,
    init=adagrad_init,
    state_depends_on=(),
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


ADAGRAD_ROOT = Rule(
    name="adagrad_eps_root",
    hyper=AdagradRootHyper,
    state=AdagradState,
    init=adagrad_init,
    state_depends_on=(),
    coefficients=adagrad_root_coefficients,
    rule=adagrad_root_rule,
    bounds=(*ADAGRAD.bounds, ("eps_root", NON_NEGATIVE)),
    sparse=rows_of_sparse,
)
"""A second rule, so that programs, kernels, groups and checkpoints do not change if e is 0."""


@constructor
def adagrad(
    lr: Scalar = 1e-2,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-10,
    *,
    maximize: bool = False,
    eps_root: Scalar = 0.0,
) -> Optimizer:
    """Adagrad: steps divided by the root of the sum of all squared gradients so far.

    ``s = s + g^2``, then ``p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        lr_decay: how fast the learning rate falls with the step, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        initial_accumulator_value: the sum before the first step, >= 0.
        eps: added to the root, >= 0.
        maximize: ascend instead of descend.
        eps_root: added under the root, >= 0. The slope of the root at 0 is infinite. So without
            ``eps_root``, a derivative through the step is NaN for an element whose gradients were
            all 0. A value such as 1e-8, or an ``initial_accumulator_value``, makes it finite. With
            0, the default, the chain has no hyper-parameter ``eps_root``.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Adagrad(foreach=False),
        which has no ``eps_root``, on dense gradients. Sparse gradients touch only the rows they
        store.

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
    options: dict[str, Scalar] = {
        "lr": lr,
        "lr_decay": lr_decay,
        "initial_accumulator_value": initial_accumulator_value,
        "eps": eps,
    }
    rule = ADAGRAD(**options) if is_zero(eps_root) else ADAGRAD_ROOT(**options, eps_root=eps_root)
    return chain(maximized(maximize), coupled_weight_decay(weight_decay), rule)
