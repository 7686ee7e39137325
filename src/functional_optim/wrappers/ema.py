"""Exponential moving average of the parameters: Polyak & Juditsky 1992, with forgetting.

e_t = d * e_{t-1} + (1 - d) * p_t
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import BELOW_ONE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import lerp


class EmaState(NamedTuple):
    average: Tensor  # e, of the parameter's shape and dtype


class EmaHyper(NamedTuple):
    decay: float  # d


class EmaCoefficients(NamedTuple):
    weight: float  # 1 - d


def ema_init(param: Tensor, hyper: EmaHyper) -> EmaState:
    return EmaState(torch.clone(param))


def ema_coefficients(step: float, hyper: EmaHyper) -> EmaCoefficients:
    return EmaCoefficients(1 - hyper.decay)


def ema_rule(
    param: Tensor, grad: Tensor, state: EmaState, c: EmaCoefficients
) -> tuple[Tensor, EmaState]:
    return param, EmaState(lerp(state.average, param, c.weight))


def ema_view(param: Tensor, state: EmaState, hyper: EmaHyper) -> Tensor:
    return state.average


EMA = Rule(
    name="ema",
    hyper=EmaHyper,
    state=EmaState,
    init=ema_init,
    state_depends_on=(),
    coefficients=ema_coefficients,
    rule=ema_rule,
    uses_gradient=False,
    bounds=(("decay", BELOW_ONE),),
    view=ema_view,
)


def ema(decay: Scalar) -> Link:
    """Keep an exponential moving average of the parameters that the stages before return.

    ``average = decay * average + (1 - decay) * p``. It starts with the parameters at ``init``.
    :meth:`Optimizer.view` returns the average. Training continues with the parameters themselves.

    Args:
        decay: a number in [0, 1), or a schedule.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule.

    Raises:
        ValueError: a number outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, ema, sgd
        >>> optimizer = chain(sgd(lr=1.0), ema(0.75))
        >>> params, state = optimizer.update(
        ...     torch.ones(1), torch.ones(1), optimizer.init(torch.ones(1)))
        >>> optimizer.view(params, state)
        tensor([0.7500])

    Reference:
        Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal on
        Control and Optimization 30(4), 1992 (the average); Tarvainen & Valpola, "Mean teachers are
        better role models", NeurIPS 2017, equation 1 (with forgetting).
    """
    return EMA(decay=decay)
