"""MARS: Yuan, Liu, Wu, Zhou & Gu 2024, algorithm 1, in its approximate form.

    c_t = g_t + gamma * b / (1 - b) * (g_t - g_{t-1})            (g_0 = g_1)
    c_t = c_t / max(1, ||c_t|| / n)                              ||.|| over one tensor

c_t replaces the gradient of the rule after it, and b is the first decay of that rule (beta_1 of
AdamW or Lion). The paper clips to n = 1 and sets b = 0.95 and gamma = 0.025. The exact form
evaluates the last parameters on this batch. The approximate form uses the last gradient instead.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, POSITIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Transform
from functional_optim.numeric import add, at_first_step, clamp, div
from functional_optim.transforms.scale_by_trust_ratio import norm_of


class MarsState(NamedTuple):
    last_grad: Tensor  # g_{t-1}, of the parameter's shape and dtype; 0 before the first step


class MarsHyper(NamedTuple):
    beta: float  # b
    gamma: float
    max_norm: float  # n
    from_zero: bool  # correct the first gradient as well, with g_0 = 0


class MarsCoefficients(NamedTuple):
    scale: float  # gamma * b / (1 - b), or 0
    max_norm: float


def mars_coefficients(step: float, hyper: MarsHyper) -> MarsCoefficients:
    scale = hyper.gamma * hyper.beta / (1 - hyper.beta)
    if not hyper.from_zero:
        scale = at_first_step(step, 0.0, scale)
    return MarsCoefficients(scale, hyper.max_norm)


def mars_transform(
    grad: Tensor, param: Tensor, state: MarsState, c: MarsCoefficients
) -> tuple[Tensor, MarsState]:
    corrected = add(grad, grad - state.last_grad, c.scale)
    excess = clamp(div(norm_of(corrected), c.max_norm), 1.0, math.inf)
    return corrected / excess.to(grad.dtype), MarsState(grad)


MARS = Transform(
    name="mars",
    hyper=MarsHyper,
    state=MarsState,
    coefficients=mars_coefficients,
    transform=mars_transform,
    bounds=(("beta", BELOW_ONE), ("gamma", FINITE_NON_NEGATIVE), ("max_norm", POSITIVE)),
    kind="per_matrix",
    takes_dtensors=True,
)


def mars(
    beta: Scalar = 0.95, gamma: Scalar = 0.025, max_norm: Scalar = 1.0, *, from_zero: bool = False
) -> Link:
    """Correct the gradient by its change since the last step, and clip it per tensor.

    ``c = g + gamma * beta / (1 - beta) * (g - last_grad)``, then ``c = c / max(1, ||c|| /
    max_norm)``. The correction reduces the variance of the momentum after it: ``chain(mars(),
    adamw(lr, betas=(0.95, 0.99)))`` is MARS-AdamW, and ``chain(mars(), lion(lr, betas=(0.95,
    0.95)))`` is MARS-Lion. After :func:`~functional_optim.accumulate`, the gradients are the
    accumulated means.

    Cost: one reduction per tensor; the state holds one gradient (the parameter's bytes).

    Args:
        beta: decay of the momentum in the rule after it, in [0, 1).
        gamma: strength of the correction, a finite number >= 0. With 0 only the clip remains.
        max_norm: the largest 2-norm of a corrected gradient, per tensor, a number > 0. Infinity
            turns the clip off.
        from_zero: correct the first gradient with ``last_grad = 0``, as the authors' code does. In
            the paper the first correction is 0, since the first two parameters are equal.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it before a rule. It needs whole leaves
        (``kind="per_matrix"``).

    Raises:
        ValueError: a number outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(mars(beta=0.5, gamma=1.0, max_norm=4.0), descend(lr=1.0))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for gradient in (1.0, 2.0, 5.0):
        ...     params, state = optimizer.update(params, torch.tensor([gradient]), state)
        ...     print(params.item())
        -1.0
        -4.0
        -8.0

    Reference:
        Yuan, Liu, Wu, Zhou, Gu, "MARS: unleashing the power of variance reduction for training
        large models", ICML 2025 (arXiv 2411.10438), algorithms 1 and 2.
    """
    return MARS(beta=beta, gamma=gamma, max_norm=max_norm, from_zero=from_zero)
