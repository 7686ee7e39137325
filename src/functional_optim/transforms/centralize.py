"""Gradient centralisation: Yong, Huang, Hua & Zhang 2020, equation 1.

    g = g - mean of g over all dimensions but the first          (tensors of two dimensions or more)

The first dimension of a torch weight counts its output units. Each unit's gradient gets mean 0.
"""

import torch
from torch import Tensor

from functional_optim.core.stage import Link, NoHyper, NoState, Transform


def centralize_transform(
    grad: Tensor, param: Tensor, state: NoState, c: NoHyper
) -> tuple[Tensor, NoState]:
    if grad.dim() < 2:
        return grad, state
    return grad - torch.mean(grad, list(range(1, grad.dim())), True), state


CENTRALIZE = Transform(
    name="centralize",
    hyper=NoHyper,
    transform=centralize_transform,
    kind="per_matrix",
    takes_dtensors=True,
)


def centralize() -> Link:
    """Subtract from the gradient of each output unit its mean.

    ``g = g - mean(g)``, where the mean is over all dimensions but the first. Tensors with fewer
    than two dimensions keep their gradient. A complex parameter counts as a real one whose last
    dimension holds real and imaginary parts.

    Cost: one reduction per tensor; no state.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it before a rule. It needs whole leaves
        (``kind="per_matrix"``). The paper centralises the gradient before momentum and decay.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(centralize(), sgd(lr=1.0))
        >>> params, grads = torch.zeros(2, 2), torch.tensor([[1.0, 3.0], [5.0, 5.0]])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([[ 1., -1.],
                [ 0.,  0.]])

    Reference:
        Yong, Huang, Hua, Zhang, "Gradient centralization: a new optimization technique for deep
        neural networks", ECCV 2020 (arXiv 2004.01461), equation 1.
    """
    return CENTRALIZE()
