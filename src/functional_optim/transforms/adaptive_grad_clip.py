"""Adaptive gradient clipping: Brock, De, Smith & Simonyan 2021, equation 3.

For each unit i (the elements that share an index of the first dimension; a vector is one unit):

    g_i = g_i * min(1, c * max(||p_i||, e) / ||g_i||)

The paper sets c = 0.01 for large batches and e = 1e-3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Transform
from functional_optim.numeric import clamp, mul, select


class AdaptiveGradClipHyper(NamedTuple):
    clipping: float  # c
    eps: float  # e


def unit_norm(tensor: Tensor) -> Tensor:
    """Return the 2-norm of each output unit in double precision, in a shape that broadcasts.

    Dimensions after the first are reduced. A tensor with fewer than two dimensions has one norm.
    """
    if tensor.dim() < 2:
        norm: Tensor = torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float64)
        return norm
    dims = list(range(1, tensor.dim()))
    norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, dims, True, dtype=torch.float64)
    return norms


def adaptive_grad_clip_transform(
    grad: Tensor, param: Tensor, state: NoState, c: AdaptiveGradClipHyper
) -> tuple[Tensor, NoState]:
    grad_norm = unit_norm(grad)
    largest = mul(clamp(unit_norm(param), c.eps, float("inf")), c.clipping)
    # The quotient must be finite even where it is not used, or its derivative is NaN.
    is_zero = grad_norm == 0.0
    factor = select(clamp(largest / select(grad_norm, is_zero, 1.0), 0.0, 1.0), is_zero, 1.0)
    return grad * factor.to(grad.dtype), state


ADAPTIVE_GRAD_CLIP = Transform(
    name="adaptive_grad_clip",
    hyper=AdaptiveGradClipHyper,
    transform=adaptive_grad_clip_transform,
    bounds=(("clipping", NON_NEGATIVE), ("eps", NON_NEGATIVE)),
    kind="per_matrix",
    takes_dtensors=True,
)


def adaptive_grad_clip(clipping: Scalar = 0.01, eps: Scalar = 1e-3) -> Link:
    """Scale down the gradient of each unit that is large relative to the unit's weights.

    ``g_i = g_i * min(1, clipping * max(||p_i||, eps) / ||g_i||)``. A unit is all elements that
    share an index of the first dimension: a row of a linear layer's weight, a filter of a
    convolution. A tensor with fewer than two dimensions is one unit. A complex parameter counts as
    a real one whose last dimension holds real and imaginary parts. Norms are computed in double
    precision.

    Cost: two reductions per tensor; no state.

    Args:
        clipping: the largest ratio of a gradient's norm to its weights' norm, a number >= 0.
            Infinity changes no gradient. The paper uses 0.01 for batches of 4096, and
            larger values for smaller batches.
        eps: lower bound of the norm of weights, a number >= 0, so that zero weights can grow.

    Returns:
        A link for :func:`~functional_optim.chain`. It needs whole leaves (``kind="per_matrix"``).
        The paper does not clip the last linear layer: exclude it with
        :func:`~functional_optim.masked`.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(adaptive_grad_clip(clipping=0.5), sgd(lr=1.0))
        >>> params, grads = torch.eye(2) * 2, torch.tensor([[0.0, 8.0], [0.25, 0.0]])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([[ 2.0000, -1.0000],
                [-0.2500,  2.0000]])

    Reference:
        Brock, De, Smith, Simonyan, "High-performance large-scale image recognition without
        normalization", ICML 2021 (arXiv 2102.06171), equation 3.
    """
    return ADAPTIVE_GRAD_CLIP(clipping=clipping, eps=eps)
