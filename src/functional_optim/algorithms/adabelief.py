"""AdaBelief: Zhuang et al. 2020, algorithm 2; AMSGrad as in its authors' program.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    s_t = b2 * s_{t-1} + (1 - b2) * (g_t - m_t)^2 + eps
    u_t = s_t, or with AMSGrad max(u_{t-1}, s_t)
    p_t = p_{t-1} - lr / (1 - b1^t) * m_t / (sqrt(u_t) / sqrt(1 - b2^t) + eps)

The authors' program can also rectify the step, as RAdam does; this rule does not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import (
    AdamCoefficients,
    AdamHyper,
    adam_coefficients,
    adam_denominator,
)
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import addcdiv, addcmul, lerp, mul, shift
from functional_optim.transforms.weight_decay import choose_weight_decay


class AdaBeliefState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_var: Tensor  # s, of the same shape and dtype
    max_exp_avg_var: list[Tensor]  # [u], of the same shape and dtype; [] without amsgrad


def adabelief_init(param: Tensor, hyper: AdamHyper) -> AdaBeliefState:
    return AdaBeliefState(
        torch.zeros_like(param),
        torch.zeros_like(param),
        [torch.zeros_like(param)] if hyper.amsgrad else [],
    )


def adabelief_rule(
    param: Tensor, grad: Tensor, state: AdaBeliefState, c: AdamCoefficients
) -> tuple[Tensor, AdaBeliefState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    surprise = grad - exp_avg
    variance = addcmul(mul(state.exp_avg_var, c.beta_2), surprise, surprise, c.weight_2)
    variance = shift(variance, c.eps)
    second, maximum = variance, state.max_exp_avg_var
    if c.amsgrad:
        second = torch.maximum(maximum[0], variance)
        maximum = [second]
    denominator = adam_denominator(second, c.root, c.eps)
    param = addcdiv(param, exp_avg, denominator, c.step_size)
    return param, AdaBeliefState(exp_avg, variance, maximum)


ADABELIEF = Rule(
    name="adabelief",
    hyper=AdamHyper,
    state=AdaBeliefState,
    init=adabelief_init,
    state_depends_on=("amsgrad",),
    coefficients=adam_coefficients,
    rule=adabelief_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE), ("eps", NON_NEGATIVE)),
)


@constructor
def adabelief(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-16,
    weight_decay: Scalar = 0.0,
    amsgrad: bool = False,
    *,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
) -> Optimizer:
    """AdaBelief: Adam that divides by the distance of gradients from their average.

    ``p = p - lr * m_hat / (sqrt(s_hat) + eps)``, where ``m`` is Adam's average gradient and
    ``s = beta_2 * s + (1 - beta_2) * (g - m)^2 + eps``. Steps are long where the average predicts
    the gradient well, and short where it does not.

    The state has 2 tensors of the parameter's shape and dtype (3 with ``amsgrad``): 8 bytes per
    float32 parameter. A step reads 4 numbers and writes 3 for each element.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to ``s`` at each step, and to the root, >= 0. Results depend on it more than
            Adam's do: the paper uses 1e-8 for convolutions and 1e-16 for transformers.
        weight_decay: coefficient of the decay, >= 0.
        amsgrad: divide by the largest ``s`` so far.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay``; else add
            ``weight_decay * p`` to the gradient.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no AdaBelief.

    Example::

        >>> import torch
        >>> optimizer = adabelief(lr=0.1, betas=(0.5, 0.999))
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.8000, 1.2000])

    Reference:
        Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed
        gradients", NeurIPS 2020, algorithm 2. The defaults are those of the authors' program,
        without its rectification.
    """
    return chain(
        maximized(maximize),
        choose_weight_decay(weight_decay, decoupled_weight_decay),
        ADABELIEF(lr=lr, betas=betas, eps=eps, amsgrad=amsgrad),
    )
