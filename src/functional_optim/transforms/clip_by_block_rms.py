"""Clipping by the root mean square of each tensor: Shazeer & Stern 2018, algorithm 4, U_t.

    RMS(g) = sqrt(mean of g^2)                   over the elements of one tensor
    g = g / max(1, RMS(g) / d)

The paper clips the update of Adafactor with d = 1 (algorithm 4). The name is optax's.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim._torch.operators import foreach_divide_
from functional_optim.bounds import POSITIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Transform
from functional_optim.numeric import clamp, div
from functional_optim.transforms.scale_by_trust_ratio import norm_of, norms_of_each, round_to_dtype


class ClipByBlockRmsHyper(NamedTuple):
    threshold: float  # d


def clip_by_block_rms_transform(
    grad: Tensor, param: Tensor, state: NoState, c: ClipByBlockRmsHyper
) -> tuple[Tensor, NoState]:
    rms = norm_of(grad) / math.sqrt(max(1, grad.numel()))
    return grad / clamp(div(rms, c.threshold), 1.0, math.inf).to(grad.dtype), state


def clip_by_block_rms_each_(
    grads: list[Tensor], params: list[Tensor], state: NoState, c: ClipByBlockRmsHyper
) -> None:
    """Scale the gradients of several leaves down, each by its own root mean square."""
    pairs = zip(norms_of_each(grads), grads, strict=True)
    sizes = [norm / math.sqrt(max(1, grad.numel())) / c.threshold for norm, grad in pairs]
    # max(size, 1.0), in this order, keeps NaN.
    foreach_divide_(grads, round_to_dtype([max(size, 1.0) for size in sizes], grads[0].dtype))


CLIP_BY_BLOCK_RMS = Transform(
    name="clip_by_block_rms",
    hyper=ClipByBlockRmsHyper,
    transform=clip_by_block_rms_transform,
    transform_each_=clip_by_block_rms_each_,
    bounds=(("threshold", POSITIVE),),
    kind="per_matrix",
    takes_dtensors=True,
)


def clip_by_block_rms(threshold: Scalar = 1.0) -> Link:
    """Scale each tensor down whose root mean square exceeds ``threshold``.

    ``g = g / max(1, RMS(g) / threshold)``. The root mean square of each tensor is computed in
    double precision. Before a rule the transform clips the gradient. Between a transform such as
    :func:`~functional_optim.scale_by_adam` and :func:`~functional_optim.descend` it clips the
    update, as in Adafactor and StableAdamW.

    Cost: one reduction per tensor; no state.

    Args:
        threshold: the largest root mean square that passes unscaled, a number > 0. Infinity changes
            no gradient. The default is that of Adafactor.

    Returns:
        A link for :func:`~functional_optim.chain`. It needs whole leaves (``kind="per_matrix"``).

    Raises:
        ValueError: a number <= 0, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(clip_by_block_rms(1.0), descend(lr=1.0))
        >>> params = {"a": torch.zeros(2), "b": torch.zeros(2)}
        >>> grads = {"a": torch.tensor([4.0, -4.0]), "b": torch.tensor([0.5, 0.5])}
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        {'a': tensor([-1.,  1.]), 'b': tensor([-0.5000, -0.5000])}

    Reference:
        Shazeer & Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018
        (arXiv 1804.04235), algorithm 4.
    """
    return CLIP_BY_BLOCK_RMS(threshold=threshold)
