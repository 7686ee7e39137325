"""LARS: You, Gitman & Ginsburg 2017, algorithm 1.

    d_t = g_t + lambda * p_{t-1}
    b_t = mu * b_{t-1} + r_t * d_t,   r_t = k * ||p_{t-1}|| / ||d_t||      (b_0 = 0)
    p_t = p_{t-1} - lr * b_t

||.|| is the 2-norm of a whole parameter; r_t = 1 if a norm is 0. As in LAMB, ||d_t|| is the norm of
the sum, where the paper adds the norms of both terms. As in torch.optim.SGD, lr multiplies the
momentum buffer, where the paper multiplies its input. With constant lr the steps are the same.
"""

from functional_optim.algorithms.sgd import trace
from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.transforms.descend import descend
from functional_optim.transforms.scale_by_trust_ratio import scale_by_trust_ratio
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


@constructor
def lars(
    lr: Scalar = 1.0,
    momentum: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    nesterov: bool = False,
    *,
    trust_coefficient: Scalar = 1e-3,
    maximize: bool = False,
) -> Optimizer:
    """LARS: momentum of gradients that are scaled to a part of the norm of the parameter.

    ``d = g + weight_decay * p``, ``b = momentum * b + r * d`` with
    ``r = trust_coefficient * ||p|| / ||d||``, or 1 where a norm is 0; then ``p = p - lr * b``, or
    ``p - lr * (r * d + momentum * b)`` with ``nesterov``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        momentum: factor of the buffer, >= 0; 0 keeps no buffer.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        nesterov: step along ``r * d + momentum * b``; needs momentum > 0.
        trust_coefficient: ratio of the norms of a scaled gradient and its parameter, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`: ``chain(weight_decay(...),
        scale_by_trust_ratio(trust_coefficient=...), trace(momentum, nesterov=...), descend(lr))``.
        torch has no LARS.

    Example::

        >>> import torch
        >>> optimizer = lars(lr=0.5, trust_coefficient=0.5)
        >>> params, state = optimizer.update(
        ...     torch.tensor([3.0, 4.0]), torch.tensor([0.0, 7.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([3.0000, 2.7500])

    Reference:
        You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        scale_by_trust_ratio(trust_coefficient=trust_coefficient),
        trace(momentum, nesterov=nesterov),
        descend(lr),
    )
