"""Lookahead: Zhang, Lucas, Hinton & Ba 2019, algorithm 1.

after each k-th step of the rule before:  s = s + a * (p - s),  p = s
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import lerp


class LookaheadState(NamedTuple):
    slow: Tensor  # s, of the parameter's shape and dtype


class LookaheadHyper(NamedTuple):
    every: int  # k
    alpha: float  # a


class LookaheadCoefficients(NamedTuple):
    alpha: float
    is_last: bool  # True at each k-th step


def lookahead_init(param: Tensor, hyper: LookaheadHyper) -> LookaheadState:
    return LookaheadState(torch.clone(param))


def lookahead_coefficients(step: float, hyper: LookaheadHyper) -> LookaheadCoefficients:
    return LookaheadCoefficients(hyper.alpha, step % hyper.every == 0)


def lookahead_rule(
    param: Tensor, grad: Tensor, state: LookaheadState, c: LookaheadCoefficients
) -> tuple[Tensor, LookaheadState]:
    if not c.is_last:
        return param, state
    slow = lerp(state.slow, param, c.alpha)
    return slow, LookaheadState(slow)


def lookahead_view(param: Tensor, state: LookaheadState, hyper: LookaheadHyper) -> Tensor:
    return state.slow


LOOKAHEAD = Rule(
    name="lookahead",
    hyper=LookaheadHyper,
    state=LookaheadState,
    init=lookahead_init,
    state_depends_on=(),
    coefficients=lookahead_coefficients,
    rule=lookahead_rule,
    uses_gradient=False,
    bounds=(("every", Interval(1)), ("alpha", Interval(0, 1))),
    view=lookahead_view,
)


def lookahead(every: int = 5, alpha: Scalar = 0.5) -> Link:
    """Move slow parameters towards the parameters every ``every`` steps, and continue from there.

    ``slow = slow + alpha * (p - slow)``, then ``p = slow``. :meth:`Optimizer.view` returns the slow
    parameters. The state of the rule before this link does not change.

    Args:
        every: number of steps between two moves, a whole number >= 1.
        alpha: part of the distance that the slow parameters move, in [0, 1].

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, lookahead, sgd
        >>> optimizer = chain(sgd(lr=1.0), lookahead(every=2, alpha=0.5))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     params, state = optimizer.update(params, torch.ones(1), state)
        ...     print(params.item())
        -1.0
        -1.0

    Reference:
        Zhang, Lucas, Hinton, Ba, "Lookahead optimizer: k steps forward, 1 step back", NeurIPS 2019,
        algorithm 1.
    """
    return LOOKAHEAD(every=every, alpha=alpha)
