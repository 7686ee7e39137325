"""Clipping by value: each element of the gradient is clipped to an interval.

g = min(max(g, -c), c)
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Transform, rows_of_sparse
from functional_optim.numeric import clamp


class ClipByValueHyper(NamedTuple):
    clip_value: float  # c


def clip_by_value_transform(
    grad: Tensor, param: Tensor, state: NoState, c: ClipByValueHyper
) -> tuple[Tensor, NoState]:
    return clamp(grad, -c.clip_value, c.clip_value), state


CLIP_BY_VALUE = Transform(
    name="clip_by_value",
    hyper=ClipByValueHyper,
    transform=clip_by_value_transform,
    bounds=(("clip_value", NON_NEGATIVE),),
    sparse=rows_of_sparse,
)


def clip_by_value(clip_value: Scalar) -> Link:
    """Clip each element of the gradient to ``[-clip_value, clip_value]``; NaN stays NaN.

    Args:
        clip_value: the largest absolute value that passes, a number >= 0.

    Returns:
        A link for :func:`~functional_optim.chain`. It equals torch.nn.utils.clip_grad_value_.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(clip_by_value(1.0), sgd(lr=1.0))
        >>> params, grads = torch.zeros(2), torch.tensor([9.0, -0.5])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([-1.0000,  0.5000])
    """
    return CLIP_BY_VALUE(clip_value=clip_value)
