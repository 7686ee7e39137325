"""Estimates of curvature, as inputs of optimizers."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim.core.format import format_value


def hutchinson(
    loss: Callable[[Any], Tensor],
    params: Any,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> tuple[Any, Any]:
    """Return gradients, and Hutchinson's estimate of the diagonal of the Hessian.

    ``d = mean of z * (H z)`` over ``samples`` vectors ``z`` of random signs. Its expectation is the
    diagonal. For a diagonal Hessian the estimate is exact.

    Args:
        loss: ``loss(params)`` returns a number. torch.func must be able to differentiate it twice.
        params: a pytree of floating tensors, such as ``dict(module.named_parameters())``.
        samples: number of vectors, >= 1. Each vector costs about two more gradients.
        generator: of the signs, on the device of the parameters; by default torch's own generator.

    Returns:
        ``(gradients, estimate)``: two detached trees like ``params``.

    Raises:
        TypeError: a leaf that is not a floating tensor.
        ValueError: less than one sample.

    Example::

        >>> def loss(params):
        ...     return (torch.tensor([1.0, 3.0]) * params["w"] ** 2).sum()
        >>> hutchinson(loss, {"w": torch.ones(2)})
        ({'w': tensor([2., 6.])}, {'w': tensor([2., 6.])})

    Reference:
        Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Applied Numerical
        Mathematics 57, 2007, equation 2.
    """
    if samples < 1:
        raise ValueError(f"samples must be a whole number >= 1, got {samples}")
    for one in optree.tree_leaves(params, none_is_leaf=True):
        if not isinstance(one, Tensor) or not one.is_floating_point():
            raise TypeError(
                f"params must be floating tensors, got {format_value(one)}: leave it out"
            )
    point = optree.tree_map(torch.detach, params)
    pair: Any = torch.func.vjp(torch.func.grad(loss), point)
    gradients, product = pair
    total: Any = None
    for _ in range(samples):
        signs = optree.tree_map(lambda one: _signs(one, generator), point)
        (image,) = product(signs)  # H is symmetric
        sample = optree.tree_map(torch.mul, signs, image)
        total = sample if total is None else optree.tree_map(torch.add, total, sample)
    return gradients, optree.tree_map(lambda one: one / samples, total)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.empty_like(like).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
