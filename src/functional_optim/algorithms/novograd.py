"""NovoGrad: Ginsburg et al. 2019, algorithm 1.

The second moment v is one number for each tensor (a layer, in the paper):

    v_1 = ||g_1||^2,  and then  v_t = b2 * v_{t-1} + (1 - b2) * ||g_t||^2
    m_t = b1 * m_{t-1} + w * (g_t / (sqrt(v_t) + eps) + lambda * p_{t-1})      (m_0 = 0)
    p_t = p_{t-1} - lr * m_t

w is 1, or 1 - b1 with ``grad_averaging``. The paper calls the decay decoupled: it is added after
the normalisation, and goes through the momentum. There is no bias correction; instead v starts at
its first value. ``betas`` are those of the paper. The paper tunes ``lr`` for each task, and 1e-3 is
the default of NVIDIA's FusedNovoGrad.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import add, at_first_step, is_active, mul, shift
from functional_optim.transforms.scale_by_trust_ratio import norm_of


class NovoGradState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, 0-d, in the parameter's dtype, or in float32 if that has 16 bits


class NovoGradHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    weight_decay: float  # lambda
    grad_averaging: bool  # True if the weight of a new direction in m is 1 - b1


class NovoGradCoefficients(NamedTuple):
    beta_1: float
    gain: float  # w
    beta_2: float  # 0 at the first step
    weight_2: float  # 1 - b2, and 1 at the first step
    eps: float
    weight_decay: float
    decays: bool
    lr: float


def novograd_init(param: Tensor, hyper: NovoGradHyper) -> NovoGradState:
    return NovoGradState(torch.zeros_like(param), widen(param.new_zeros(())))


def novograd_coefficients(step: float, hyper: NovoGradHyper) -> NovoGradCoefficients:
    beta_1, beta_2 = hyper.betas
    return NovoGradCoefficients(
        beta_1,
        1 - beta_1 if hyper.grad_averaging else 1.0,
        at_first_step(step, 0.0, beta_2),
        at_first_step(step, 1.0, 1 - beta_2),
        hyper.eps,
        hyper.weight_decay,
        is_active(hyper.weight_decay),
        hyper.lr,
    )


def novograd_rule(
    param: Tensor, grad: Tensor, state: NovoGradState, c: NovoGradCoefficients
) -> tuple[Tensor, NovoGradState]:
    second = state.exp_avg_sq
    square = norm_of(grad).square().to(second.dtype)
    second = add(mul(second, c.beta_2), square, c.weight_2)
    direction = (grad / shift(second.sqrt(), c.eps)).to(grad.dtype)
    if c.decays:
        direction = add(direction, param, c.weight_decay)
    exp_avg = add(mul(state.exp_avg, c.beta_1), direction, c.gain)
    return add(param, exp_avg, -c.lr), NovoGradState(exp_avg, second)


NOVOGRAD = Rule(
    name="novograd",
    hyper=NovoGradHyper,
    state=NovoGradState,
    init=novograd_init,
    state_depends_on=(),
    coefficients=novograd_coefficients,
    rule=novograd_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("weight_decay", NON_NEGATIVE),
    ),
    kind="per_matrix",
    takes_dtensors=True,
)


@constructor
def novograd(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.95, 0.98),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    grad_averaging: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """NovoGrad: momentum of gradients that are divided by a running average of their norm.

    ``v = beta_2 * v + (1 - beta_2) * ||g||^2`` for each whole tensor, then
    ``m = beta_1 * m + g / (sqrt(v) + eps) + weight_decay * p`` and ``p = p - lr * m``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the momentum and of the average of squared norms, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of ``p`` in the direction, >= 0, added after the normalisation.
        grad_averaging: multiply the direction by ``1 - betas[0]`` in the momentum. Without it, as
            in the paper, steps are up to ``1 / (1 - betas[0])`` times as long.
        maximize: ascend instead of descend (the decay still shrinks).

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is one tensor of the parameter's shape
        and dtype, and one number for each tensor: 4 bytes per float32 parameter. It needs whole
        tensors (``kind="per_matrix"``). torch has no NovoGrad.

    Example::

        >>> import torch
        >>> optimizer = novograd(lr=0.5)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -4.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.7000, 1.4000])

    Reference:
        Ginsburg, Castonguay, Hrinchuk et al., "Stochastic gradient methods with layer-wise adaptive
        moments for training of deep networks", arXiv 1905.11286, 2019, algorithm 1.
    """
    return chain(
        maximized(maximize),
        NOVOGRAD(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_averaging=grad_averaging
        ),
    )
