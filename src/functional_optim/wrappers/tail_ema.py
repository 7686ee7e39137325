"""Exponential moving average of the tail of a run: Polyak & Juditsky 1992, with forgetting.

    t <= s:     e_t = p_t
    t > s:      e_t = d * e_{t-1} + (1 - d) * p_t

Parameters from before step s have no weight in the average.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import BELOW_ONE, Interval
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import at_first_step, lerp, mask_like
from functional_optim.wrappers.ema import EmaHyper, EmaState, ema_init, ema_view
from functional_optim.wrappers.swa import steps_after


class TailEmaHyper(NamedTuple):
    decay: float  # d
    start: int  # s


class TailEmaCoefficients(NamedTuple):
    weight: float  # 1 - d
    restarts: float  # 1 if e_t is p_t, else 0


def tail_ema_init(param: Tensor, hyper: TailEmaHyper) -> EmaState:
    return ema_init(param, EmaHyper(0.0))


def tail_ema_coefficients(step: float, hyper: TailEmaHyper) -> TailEmaCoefficients:
    after = steps_after(step, hyper.start)
    return TailEmaCoefficients(1 - hyper.decay, at_first_step(after + 1.0, 1.0, 0.0))


def tail_ema_rule(
    param: Tensor, grad: Tensor, state: EmaState, c: TailEmaCoefficients
) -> tuple[Tensor, EmaState]:
    average = lerp(state.average, param, c.weight)
    return param, EmaState(torch.where(mask_like(param, c.restarts), param, average))


def tail_ema_view(param: Tensor, state: EmaState, hyper: TailEmaHyper) -> Tensor:
    return ema_view(param, state, EmaHyper(0.0))


TAIL_EMA = Rule(
    name="tail_ema",
    hyper=TailEmaHyper,
    state=EmaState,
    init=tail_ema_init,
    state_depends_on=(),
    coefficients=tail_ema_coefficients,
    rule=tail_ema_rule,
    uses_gradient=False,
    bounds=(("decay", BELOW_ONE), ("start", Interval(0))),
    view=tail_ema_view,
)


def tail_ema(decay: Scalar, start: int) -> Link:
    """Average the parameters with exponential weights, from step ``start`` on.

    ``average = decay * average + (1 - decay) * p`` after each step after ``start``. Until then, the
    average equals the parameter, so the initial parameters have no weight in it. With
    ``start=0`` it is :func:`~functional_optim.ema`, bit for bit. :meth:`Optimizer.view` and
    :meth:`TorchOptimizer.averaged` return the average.

    Cost: three element-wise operations; the state holds the parameter's bytes.

    Args:
        decay: a number in [0, 1), or a schedule.
        start: the step whose parameters the average starts from, a whole number >= 0.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(sgd(lr=1.0), tail_ema(decay=0.5, start=2))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     params, state = optimizer.update(params, -torch.ones(1), state)
        ...     print(params.item(), optimizer.view(params, state).item())
        1.0 1.0
        2.0 2.0
        3.0 2.5

    Reference:
        Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal on
        Control and Optimization 30(4), 1992 (the average); Tarvainen & Valpola, "Mean teachers are
        better role models", NeurIPS 2017, equation 1 (with forgetting).
    """
    return TAIL_EMA(decay=decay, start=start)
