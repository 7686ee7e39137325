"""FTRL-Proximal: McMahan et al. 2013, algorithm 1, where the gradient of an element is not 0.

    n_t = n_{t-1} + g_t^2                                                 (n_0 = 0)
    z_t = z_{t-1} + lr * g_t - (sqrt(n_t) - sqrt(n_{t-1})) * p_{t-1}      (z_0 = 0)
    p_t = 0  if |z_t| <= lr * l1,
          else (sign(z_t) * lr * l1 - z_t) / (beta + sqrt(n_t) + lr * l2)

z is the paper's z times lr (the paper's alpha). With constant lr the parameters are the same. If lr
falls, and l1 = l2 = 0, steps become smaller. With the paper's z, the parameters themselves would
become smaller.

The paper steps an element if its feature is not 0. This rule steps an element if its gradient is
not 0. For all other elements n and z would not change, and p does not change either.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE
from functional_optim.core.stage import Rule, rows_of_sparse
from functional_optim.numeric import add, addcmul, clamp, shift


class FTRLState(NamedTuple):
    z: Tensor  # lr times the paper's z, of the parameter's shape and dtype
    n: Tensor  # the sum of squared gradients, the same


class FTRLHyper(NamedTuple):
    lr: float  # learning rate, the paper's alpha
    beta: float
    l1: float  # lambda_1
    l2: float  # lambda_2


class FTRLCoefficients(NamedTuple):
    lr: float
    threshold: float  # lr * l1
    offset: float  # beta + lr * l2


def ftrl_coefficients(step: float, hyper: FTRLHyper) -> FTRLCoefficients:
    return FTRLCoefficients(hyper.lr, hyper.lr * hyper.l1, hyper.beta + hyper.lr * hyper.l2)


def ftrl_rule(
    param: Tensor, grad: Tensor, state: FTRLState, c: FTRLCoefficients
) -> tuple[Tensor, FTRLState]:
    n = addcmul(state.n, grad, grad, 1.0)
    root = n.sqrt()
    z = addcmul(add(state.z, grad, c.lr), root - state.n.sqrt(), param, -1.0)
    # Elements within the threshold become exactly 0: clamp(z) - z is 0 for them.
    solved = (clamp(z, -c.threshold, c.threshold) - z) / shift(root, c.offset)
    return torch.where(grad == 0, param, solved), FTRLState(z, n)


FTRL = Rule(
    name="ftrl",
    hyper=FTRLHyper,
    state=FTRLState,
    coefficients=ftrl_coefficients,
    rule=ftrl_rule,
    bounds=tuple((name, FINITE_NON_NEGATIVE) for name in FTRLHyper._fields),
    sparse=rows_of_sparse,
)


@constructor
def ftrl(
    lr: Scalar = 0.1,
    beta: Scalar = 1.0,
    l1: Scalar = 0.0,
    l2: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """FTRL-Proximal: a rate for each element, and an L1 penalty that makes weights exactly 0.

    ``n = n + g^2`` and ``z = z + lr * g - (sqrt(n) - sqrt(n before)) * p``; then ``p = 0`` where
    ``|z| <= lr * l1``, else ``(sign(z) * lr * l1 - z) / (beta + sqrt(n) + lr * l2)``. An element
    whose gradient is 0 is left alone.

    Start parameters at 0, as in the paper. The first gradients draw other parameters to 0, since
    ``beta`` acts like an L2 penalty of ``beta / lr``.

    Args:
        lr: learning rate, the paper's alpha, a finite number >= 0. Any number may be a 0-d tensor
            or a schedule. With ``l1`` or ``l2``, keep it constant, since their strength depends on
            it.
        beta: keeps the first steps small, a finite number >= 0. The paper recommends 1.
        l1: strength of the penalty on ``|p|``, a finite number >= 0.
        l2: strength of the penalty on ``p^2 / 2``, a finite number >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is ``z`` (``lr`` times the paper's, so
        that ``lr`` may change) and ``n``, both of the parameter's shape and dtype. Sparse
        gradients change only the rows they store. A derivative through the step is NaN for an
        element whose gradients were all 0, since the slope of the root at 0 is infinite. torch has
        no FTRL.

    Example::

        >>> import torch
        >>> optimizer = ftrl(lr=1.0, l1=1.0)
        >>> params, state = optimizer.update(
        ...     torch.zeros(3), torch.tensor([3.0, -0.5, 0.0]), optimizer.init(torch.zeros(3)))
        >>> params
        tensor([-0.5000,  0.0000,  0.0000])

    Reference:
        McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1.
    """
    return chain(maximized(maximize), FTRL(lr=lr, beta=beta, l1=l1, l2=l2))
