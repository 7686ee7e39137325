"""AdamW: Adam with decoupled weight decay. Loshchilov & Hutter 2019, algorithm 2.

    p_t = (1 - lr * lambda) * p_{t-1}, then Adam's step

The chain is the decoupled decay, then Adam (``adam.py``).
"""

from functional_optim.algorithms.adam import adam
from functional_optim.authoring import Optimizer, Scalar, constructor


@constructor
def adamw(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    eps_root: Scalar = 0.0,
) -> Optimizer:
    """Adam whose weight decay acts on the parameter, not through the averages.

    ``p = (1 - lr * weight_decay) * p - lr * m_hat / (sqrt(v_hat) + eps)``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        amsgrad: divide by the largest second average so far.
        maximize: ascend instead of descend (the decay still shrinks).
        eps_root: added under the root, >= 0: as for :func:`~functional_optim.adam`, for finite
            derivatives where all gradients of an element were 0.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.AdamW(foreach=False).

    Example::

        >>> import torch
        >>> optimizer = adamw(lr=0.1, weight_decay=0.5)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.8500, 1.0500])

    Reference:
        Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2.
    """
    return adam(
        lr,
        betas,
        eps,
        weight_decay,
        amsgrad,
        maximize=maximize,
        decoupled_weight_decay=True,
        eps_root=eps_root,
    )
