"""LAMB: You et al. 2020, algorithm 2.

    u_t = Adam's direction of g_t (see ``adam.py``), m_hat / (sqrt(v_hat) + eps)
    d_t = u_t + lambda * p_{t-1}
    p_t = p_{t-1} - lr * r_t * d_t,   r_t = min(max(||p_{t-1}||, a) / ||d_t||, b)

||.|| is the 2-norm of a whole parameter; r_t = 1 if a norm is 0. The paper bounds the norm of the
parameter on both sides. Here the norm is bounded from below, and the ratio from above.
"""

import math

from functional_optim.algorithms.adam import scale_by_adam
from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.transforms.descend import descend
from functional_optim.transforms.scale_by_trust_ratio import scale_by_trust_ratio
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


@constructor
def lamb(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.01,
    *,
    min_norm: Scalar = 0.0,
    max_ratio: Scalar = math.inf,
    maximize: bool = False,
) -> Optimizer:
    """LAMB: Adam with steps that are as long as ``lr`` times the parameter.

    ``d = m_hat / (sqrt(v_hat) + eps) + weight_decay * p``, then ``p = p - lr * r * d`` with
    ``r = min(max(||p||, min_norm) / ||d||, max_ratio)``, or 1 where a norm is 0.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of ``p`` in the direction, >= 0.
        min_norm: lower bound of the norm of the parameter, >= 0.
        max_ratio: the largest ratio of the norms, >= 0.
        maximize: ascend instead of descend (the decay still shrinks).

    Returns:
        An :class:`~functional_optim.Optimizer`: ``chain(scale_by_adam(betas, eps),
        weight_decay(...), scale_by_trust_ratio(min_norm, max_ratio), descend(lr))``. torch has no
        LAMB.

    Example::

        >>> import torch
        >>> optimizer = lamb(lr=0.5, weight_decay=0.0)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.5000, 1.5000])

    Reference:
        You, Li, Reddi et al., "Large batch optimization for deep learning: training BERT in 76
        minutes", ICLR 2020, algorithm 2.
    """
    return chain(
        maximized(maximize),
        scale_by_adam(betas, eps),
        coupled_weight_decay(weight_decay),
        scale_by_trust_ratio(min_norm, max_ratio),
        descend(lr),
    )
