"""Outer Nesterov momentum: Douillard et al. 2023 (DiLoCo), algorithm 1, with one worker.

After each H-th step of the rule before, with s the slow and p the fast parameters:

    d = s - p
    b = mu * b + d                               (b_0 = 0)
    s = s - lr_o * (d + mu * b)
    p = s

The outer step is torch.optim.SGD(lr=lr_o, momentum=mu, nesterov=True) on the pseudo-gradient d. The
paper sets lr_o = 0.7, mu = 0.9 and H = 500. With Muon as the rule it is MuLoCo-1 (Therien et al.
2025).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import add, at_first_step, mask_like, mul


class OuterNesterovState(NamedTuple):
    slow: Tensor  # s, of the parameter's shape and dtype
    outer_momentum_buffer: Tensor  # b, of the parameter's shape and dtype


class OuterNesterovHyper(NamedTuple):
    every: int  # H
    outer_lr: float  # lr_o
    outer_momentum: float  # mu


class OuterNesterovCoefficients(NamedTuple):
    # 1 at an H-th step, else 0: a number, so that one program or CUDA graph serves every step
    is_outer: float
    outer_momentum: float
    step_size: float  # -lr_o


def outer_nesterov_init(param: Tensor, hyper: OuterNesterovHyper) -> OuterNesterovState:
    return OuterNesterovState(torch.clone(param), torch.zeros_like(param))


def outer_nesterov_coefficients(
    step: float, hyper: OuterNesterovHyper
) -> OuterNesterovCoefficients:
    is_outer = at_first_step(step % hyper.every + 1.0, 1.0, 0.0)
    return OuterNesterovCoefficients(is_outer, hyper.outer_momentum, -hyper.outer_lr)


def outer_nesterov_rule(
    param: Tensor, grad: Tensor, state: OuterNesterovState, c: OuterNesterovCoefficients
) -> tuple[Tensor, OuterNesterovState]:
    difference = state.slow - param
    buffer = mul(state.outer_momentum_buffer, c.outer_momentum) + difference
    slow = add(state.slow, add(difference, buffer, c.outer_momentum), c.step_size)
    is_outer = mask_like(param, c.is_outer)
    return torch.where(is_outer, slow, param), OuterNesterovState(
        torch.where(is_outer, slow, state.slow),
        torch.where(is_outer, buffer, state.outer_momentum_buffer),
    )


def outer_nesterov_view(
    param: Tensor, state: OuterNesterovState, hyper: OuterNesterovHyper
) -> Tensor:
    return state.slow


OUTER_NESTEROV = Rule(
    name="outer_nesterov",
    hyper=OuterNesterovHyper,
    state=OuterNesterovState,
    init=outer_nesterov_init,
    state_depends_on=(),
    coefficients=outer_nesterov_coefficients,
    rule=outer_nesterov_rule,
    uses_gradient=False,
    bounds=(
        ("every", Interval(1)),
        ("outer_lr", FINITE_NON_NEGATIVE),
        ("outer_momentum", NON_NEGATIVE),
    ),
    view=outer_nesterov_view,
)


def outer_nesterov(every: int = 500, outer_lr: Scalar = 0.7, outer_momentum: Scalar = 0.9) -> Link:
    """Step slow parameters with Nesterov momentum every ``every`` steps, and continue from there.

    The distance that the rule moved in ``every`` steps is the gradient of an outer SGD:
    ``d = slow - p``, ``b = outer_momentum * b + d``,
    ``slow = slow - outer_lr * (d + outer_momentum * b)``, and ``p = slow``. The state of the rule
    before this link does not change. :meth:`Optimizer.view` returns the slow parameters. This is
    DiLoCo with one worker; with Muon as the rule it is MuLoCo-1. With ``outer_momentum=0`` it is
    :func:`~functional_optim.lookahead` with ``alpha=outer_lr``, up to rounding.

    Cost: nine element-wise operations in every step, since one program serves all steps; the state
    holds twice the parameter's bytes.

    Args:
        every: steps between two outer steps, a whole number >= 1.
        outer_lr: learning rate of the outer step, a finite number >= 0.
        outer_momentum: decay of the outer momentum, >= 0.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule. The defaults are those of
        DiLoCo.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> outer = outer_nesterov(every=2, outer_lr=0.5, outer_momentum=0.5)
        >>> optimizer = chain(sgd(lr=1.0), outer)
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for _ in range(4):
        ...     params, state = optimizer.update(params, -torch.ones(1), state)
        ...     print(params.item())
        1.0
        1.5
        2.5
        3.25

    Reference:
        Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023
        (arXiv 2311.08105), algorithm 1; Therien et al., "MuLoCo: Muon is a
        practical inner optimizer for DiLoCo", 2025 (arXiv 2505.23725).
    """
    return OUTER_NESTEROV(every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
