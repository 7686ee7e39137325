"""FTRL-Proximal: McMahan et al. 2013, algorithm 1, where the gradient of an element is not 0.

    n_t = n_{t-1} + g_t^2                                                 (n_0 = 0)
    z_t = z_{t-1} + lr * g_t - (sqrt(n_t) - sqrt(n_{t-1})) * p_{t-1}      (z_0 = 0)
    p_t = 0  if |z_t| <= lr * l1,
          else (sign(z_t) * lr * l1 - z_t) / (beta + sqrt(n_t) + lr * l2)

z is lr (the paper's alpha) times the paper's z: as long as lr stays the same, the parameters are
the same, and where there is no l1 and no l2, a rate that falls, or is 0, then slows the steps.
With the paper's z it would shrink the parameters themselves.

The paper steps an element where its feature is not 0; here, where its gradient is not. Elsewhere
n and z would stay as they are, and so does p.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import FINITE_NON_NEGATIVE
from functional_optim.composition import chain
from functional_optim.core.constructor import constructor
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Rule, rows_of_sparse
from functional_optim.numeric import add, addcmul, clamp, shift
from functional_optim.optimizer import Optimizer
from functional_optim.transforms.maximize import maximized


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


def ftrl_init(param: Tensor, hyper: FTRLHyper) -> FTRLState:
    return FTRLState(torch.zeros_like(param), torch.zeros_like(param))


def ftrl_coefficients(step: float, hyper: FTRLHyper) -> FTRLCoefficients:
    return FTRLCoefficients(hyper.lr, hyper.lr * hyper.l1, hyper.beta + hyper.lr * hyper.l2)


def ftrl_rule(
    param: Tensor, grad: Tensor, state: FTRLState, c: FTRLCoefficients
) -> tuple[Tensor, FTRLState]:
    n = addcmul(state.n, grad, grad, 1.0)
    root = n.sqrt()
    z = addcmul(add(state.z, grad, c.lr), root - state.n.sqrt(), param, -1.0)
    # A number less itself is 0, so that what is within the threshold becomes 0 to the bit.
    solved = (clamp(z, -c.threshold, c.threshold) - z) / shift(root, c.offset)
    return torch.where(grad == 0, param, solved), FTRLState(z, n)


FTRL = Rule(
    name="ftrl",
    hyper=FTRLHyper,
    state=FTRLState,
    init=ftrl_init,
    state_depends_on=(),
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

    Parameters are meant to start at 0, as in the paper. Others are drawn to 0 by their first
    gradients, since ``beta`` holds all weights to 0 like an L2 penalty of ``beta / lr``.

    Args:
        lr: learning rate, the paper's alpha, a finite number >= 0; like every number here, it may
            be a 0-d tensor or a schedule. With ``l1`` or ``l2`` it is meant to stay the same, for
            their strength goes with it.
        beta: keeps the first steps small, a finite number >= 0; 1 is good enough, says the paper.
        l1: strength of the penalty on ``|p|``, a finite number >= 0.
        l2: strength of the penalty on ``p^2 / 2``, a finite number >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is ``z`` (``lr`` times the paper's, so
        that ``lr`` may change) and ``n``, both of the parameter's shape and dtype. Sparse
        gradients touch only the rows they store. A derivative through the step is NaN for an
        element whose gradients were all 0, for the root has an infinite slope there. torch has no
        FTRL.

    Raises:
        ValueError: a value outside the bounds above.

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
