"""Lion: Chen et al. 2023, algorithm 2.

    c_t = b1 * m_{t-1} + (1 - b1) * g_t
    p_t = p_{t-1} - lr * (sign(c_t) + lambda * p_{t-1})
    m_t = b2 * m_{t-1} + (1 - b2) * g_t          (m_0 = 0)

The decay is decoupled weight decay before the step, ``(1 - lr * lambda) * p``, which is equal.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE
from functional_optim.core.stage import Link, Rule, Transform
from functional_optim.numeric import add, lerp
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class LionState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype


class LionHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # weights of m in the direction and in its own decay


class LionCoefficients(NamedTuple):
    lr: float
    weight_1: float  # 1 - b1
    weight_2: float  # 1 - b2


def lion_coefficients(step: float, hyper: LionHyper) -> LionCoefficients:
    beta_1, beta_2 = hyper.betas
    return LionCoefficients(hyper.lr, 1 - beta_1, 1 - beta_2)


def lion_direction(
    grad: Tensor, state: LionState, weight_1: float, weight_2: float
) -> tuple[Tensor, LionState]:
    """Return the direction of a step, and the new state."""
    direction = lerp(state.exp_avg, grad, weight_1).sign()
    return direction, LionState(lerp(state.exp_avg, grad, weight_2))


def lion_rule(
    param: Tensor, grad: Tensor, state: LionState, c: LionCoefficients
) -> tuple[Tensor, LionState]:
    direction, state = lion_direction(grad, state, c.weight_1, c.weight_2)
    return add(param, direction, -c.lr), state


LION = Rule(
    name="lion",
    hyper=LionHyper,
    state=LionState,
    coefficients=lion_coefficients,
    rule=lion_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE)),
)


class ScaleByLionHyper(NamedTuple):
    betas: tuple[float, float]  # weights of m in the direction and in its own decay


class ScaleByLionCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    weight_2: float  # 1 - b2


def scale_by_lion_coefficients(step: float, hyper: ScaleByLionHyper) -> ScaleByLionCoefficients:
    c = lion_coefficients(step, LionHyper(1.0, hyper.betas))
    return ScaleByLionCoefficients(c.weight_1, c.weight_2)


def scale_by_lion_transform(
    grad: Tensor, param: Tensor, state: LionState, c: ScaleByLionCoefficients
) -> tuple[Tensor, LionState]:
    return lion_direction(grad, state, c.weight_1, c.weight_2)


SCALE_BY_LION = Transform(
    name="scale_by_lion",
    hyper=ScaleByLionHyper,
    state=LionState,
    coefficients=scale_by_lion_coefficients,
    transform=scale_by_lion_transform,
    bounds=(("betas", BELOW_ONE),),
)


@constructor
def lion(
    lr: Scalar = 1e-4,
    betas: tuple[Scalar, Scalar] = (0.9, 0.99),
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Lion: steps of one size, along the sign of an average of gradient and momentum.

    ``p = p - lr * (sign(beta_1 * m + (1 - beta_1) * g) + weight_decay * p)``, then
    ``m = beta_2 * m + (1 - beta_2) * g``.

    Args:
        lr: size of each step, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: weights of the momentum in the direction and in its own decay, each in [0, 1).
        weight_decay: coefficient of the decoupled decay, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no Lion.

    Example::

        >>> import torch
        >>> optimizer = lion(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """
    return chain(
        maximized(maximize), decoupled_weight_decay(weight_decay), LION(lr=lr, betas=betas)
    )


def scale_by_lion(betas: tuple[Scalar, Scalar] = (0.9, 0.99)) -> Link:
    """Lion's direction: the sign of an average of gradient and momentum.

    ``u = sign(beta_1 * m + (1 - beta_1) * g)``, then ``m = beta_2 * m + (1 - beta_2) * g``.

    Args:
        betas: weights of the momentum in the direction and in its own decay, each in [0, 1).

    Returns:
        A link for :func:`~functional_optim.chain`. Before :func:`~functional_optim.descend` it is
        :func:`~functional_optim.lion`, bit for bit.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_lion(), descend(lr=0.1))
        >>> optimizer.update(torch.ones(2), torch.tensor([3.0, -2.0]),
        ...                  optimizer.init(torch.ones(2)))[0]
        tensor([0.9000, 1.1000])

    Reference:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """
    return SCALE_BY_LION(betas=betas)
