"""Layer-wise trust ratio: steps as long as the parameter. You et al. 2017 (LARS), 2020 (LAMB).

    r = min(k * max(||p||, a) / ||u||, b)        r = 1 where max(||p||, a) or ||u|| is 0
    u = r * u

||.|| is the 2-norm of a whole leaf.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_mul_, foreach_vector_norm
from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Transform
from functional_optim.native import native_norms
from functional_optim.numeric import clamp, mul, select


class ScaleByTrustRatioHyper(NamedTuple):
    min_norm: float  # a
    max_ratio: float  # b
    trust_coefficient: float  # k


def norm_of(tensor: Tensor) -> Tensor:
    """Return the 2-norm of a tensor in double precision."""
    norm: Tensor = torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float64)
    return norm


def trust_ratio(param_norm: Tensor, update_norm: Tensor, c: ScaleByTrustRatioHyper) -> Tensor:
    """Return r, for each of the norms."""
    param_norm = clamp(param_norm, c.min_norm, math.inf)
    is_free = (param_norm == 0.0) | (update_norm == 0.0)
    # The quotient must be finite even where it is not used, or its derivative is NaN.
    ratio = mul(param_norm / select(update_norm, is_free, 1.0), c.trust_coefficient)
    return select(clamp(ratio, 0.0, c.max_ratio), is_free, 1.0)


def norms_of_each(tensors: list[Tensor]) -> list[float]:
    """Return :func:`norm_of` of each tensor, with equal bits. The tensors are plain, on the CPU."""
    found = native_norms(tensors)
    if found is None:
        found = torch.stack(foreach_vector_norm(tensors, dtype=torch.float64)).tolist()
    return found


def round_to_dtype(numbers: list[float], dtype: torch.dtype) -> list[float]:
    """Round numbers to a 16-bit dtype, like 0-d tensors of that dtype."""
    if dtype.itemsize >= torch.float32.itemsize:
        return numbers  # the foreach operation rounds them to its dtype
    rounded: list[float] = (
        torch.tensor(numbers, dtype=torch.float64, device="cpu").to(dtype).tolist()
    )
    return rounded


def scale_by_trust_ratio_transform(
    grad: Tensor, param: Tensor, state: NoState, c: ScaleByTrustRatioHyper
) -> tuple[Tensor, NoState]:
    ratio = trust_ratio(norm_of(param), norm_of(grad), c)
    return grad * ratio.to(grad.dtype), state


FEW = 64
"""Up to this number of leaves, ratios are faster as Python floats than as one tensor."""


def trust_ratios_of_numbers(
    param_norms: Sequence[float], update_norms: Sequence[float], c: ScaleByTrustRatioHyper
) -> list[float]:
    """Return the :func:`trust_ratio` of each pair of numbers, with equal bits."""
    least, most, factor = c.min_norm, c.max_ratio, c.trust_coefficient
    ratios = []
    for own, other in zip(param_norms, update_norms, strict=True):
        norm = max(own, least)  # in this order, max keeps NaN
        is_free = norm == 0.0 or other == 0.0
        ratios.append(1.0 if is_free else min(max(norm / other * factor, 0.0), most))
    return ratios


def scale_by_trust_ratio_each_(
    grads: list[Tensor], params: list[Tensor], state: NoState, c: ScaleByTrustRatioHyper
) -> None:
    """Scale the gradients of several leaves, each by its own ratio."""
    count = len(grads)
    norms = norms_of_each([*params, *grads])
    if count <= FEW:
        ratios = trust_ratios_of_numbers(norms[:count], norms[count:], c)
    else:
        norm = torch.tensor(norms, dtype=torch.float64, device="cpu")
        ratios = trust_ratio(norm[:count], norm[count:], c).tolist()
    foreach_mul_(grads, round_to_dtype(ratios, grads[0].dtype))


SCALE_BY_TRUST_RATIO = Transform(
    name="scale_by_trust_ratio",
    hyper=ScaleByTrustRatioHyper,
    transform=scale_by_trust_ratio_transform,
    transform_each_=scale_by_trust_ratio_each_,
    bounds=(
        ("min_norm", NON_NEGATIVE),
        ("max_ratio", NON_NEGATIVE),
        ("trust_coefficient", NON_NEGATIVE),
    ),
    kind="per_matrix",
    takes_dtensors=True,
)


def scale_by_trust_ratio(
    min_norm: Scalar = 0.0, max_ratio: Scalar = math.inf, trust_coefficient: Scalar = 1.0
) -> Link:
    """Scale the update of each leaf to the norm of the leaf.

    ``u = r * u``, ``r = min(trust_coefficient * max(||p||, min_norm) / ||u||, max_ratio)``, with
    2-norms of the whole leaf in double precision. ``r = 1`` if either norm is 0, such as that of a
    bias that starts at 0. Use :func:`~functional_optim.masked` to exclude leaves, such as biases.

    Args:
        min_norm: lower bound of the norm of the parameter, a number >= 0.
        max_ratio: the largest ratio, a number >= 0.
        trust_coefficient: factor of the ratio, a number >= 0.

    Returns:
        A link for :func:`~functional_optim.chain`. It needs whole leaves (``kind="per_matrix"``).

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_trust_ratio(), descend(lr=0.5))
        >>> params, grads = torch.tensor([3.0, 4.0]), torch.tensor([0.0, -100.0])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([3.0000, 6.5000])

    Reference:
        You, Li, Reddi et al., "Large batch optimization for deep learning: training BERT in 76
        minutes", ICLR 2020, algorithm 2 (where ``min_norm`` and an upper end bound the norm of the
        parameter); You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017,
        eq. 6 (the trust coefficient).
    """
    return SCALE_BY_TRUST_RATIO(
        min_norm=min_norm, max_ratio=max_ratio, trust_coefficient=trust_coefficient
    )
