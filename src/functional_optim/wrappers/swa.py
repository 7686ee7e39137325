"""Stochastic weight averaging: Izmailov, Podoprikhin, Garipov, Vetrov & Wilson 2018, algorithm 1.

    t <= s:               a_t = p_t
    t = s + n * k:        a_t = a_{t-1} + (p_t - a_{t-1}) / (n + 1)          (n = 0, 1, 2, ...)
    other steps:          a_t = a_{t-1}

From step s on, a is the mean of the parameters after every k-th step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import at_first_step, lerp, mask_like


class SwaState(NamedTuple):
    average: Tensor  # a, of the parameter's shape and dtype


class SwaHyper(NamedTuple):
    start: int  # s
    every: int  # k


class SwaCoefficients(NamedTuple):
    weight: float  # of p_t in a_t, at a step that is averaged
    keeps: float  # 1 at a step that is not averaged, else 0
    restarts: float  # 1 if a_t is p_t, else 0


def steps_after(step: float, start: int) -> float:
    """Return ``max(step - start, 0)`` by arithmetic only, which a graph can record."""
    difference = step - start
    size: float = (difference * difference) ** 0.5
    return (difference + size) / 2.0


def swa_init(param: Tensor, hyper: SwaHyper) -> SwaState:
    return SwaState(torch.clone(param))


def swa_coefficients(step: float, hyper: SwaHyper) -> SwaCoefficients:
    after = steps_after(step, hyper.start)
    count = after / hyper.every + 1.0
    keeps = at_first_step(after % hyper.every + 1.0, 0.0, 1.0)
    return SwaCoefficients(1.0 / count, keeps, at_first_step(count, 1.0, 0.0))


def swa_rule(
    param: Tensor, grad: Tensor, state: SwaState, c: SwaCoefficients
) -> tuple[Tensor, SwaState]:
    average = lerp(state.average, param, c.weight)
    average = torch.where(mask_like(param, c.restarts), param, average)
    return param, SwaState(torch.where(mask_like(param, c.keeps), state.average, average))


def swa_view(param: Tensor, state: SwaState, hyper: SwaHyper) -> Tensor:
    return state.average


SWA = Rule(
    name="swa",
    hyper=SwaHyper,
    state=SwaState,
    init=swa_init,
    state_depends_on=(),
    coefficients=swa_coefficients,
    rule=swa_rule,
    uses_gradient=False,
    bounds=(("start", Interval(1)), ("every", Interval(1))),
    view=swa_view,
)


def swa(start: int, every: int = 1) -> Link:
    """Average the parameters after step ``start`` and after every ``every``-th step from there on.

    :meth:`Optimizer.view` and :meth:`TorchOptimizer.averaged` return the average. Training
    continues with the parameters themselves. Until step ``start``, the average equals the
    parameter. The paper uses a constant or a cyclical learning rate, with ``every`` the length of a
    cycle.
    Statistics of batch normalisation are not parameters: recompute them for the averaged weights
    (``torch.optim.swa_utils.update_bn``).

    Parameters of other steps have no effect on the average, even if they are not finite.

    Cost: five element-wise operations; the state holds the parameter's bytes.

    Args:
        start: the first step whose parameters are averaged, a whole number >= 1.
        every: number of steps between two terms of the average, a whole number >= 1.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule.

    Raises:
        TypeError, ValueError: not a whole number, or a number below 1.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(sgd(lr=1.0), swa(start=2, every=2))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for _ in range(4):
        ...     params, state = optimizer.update(params, -torch.ones(1), state)
        ...     print(params.item(), optimizer.view(params, state).item())
        1.0 1.0
        2.0 2.0
        3.0 2.0
        4.0 3.0

    Reference:
        Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, "Averaging weights leads to wider optima and
        better generalization", UAI 2018 (arXiv 1803.05407), algorithm 1.
    """
    return SWA(start=start, every=every)
