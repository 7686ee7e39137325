"""Descent: the parameter steps along the negative update of the stages before.

    p = p - lr * u

It is the rule at the end of a chain of transforms.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import FINITE_NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Rule, rows_of_sparse
from functional_optim.numeric import add


class DescendHyper(NamedTuple):
    lr: float  # learning rate


def descend_rule(
    param: Tensor, grad: Tensor, state: NoState, c: DescendHyper
) -> tuple[Tensor, NoState]:
    return add(param, grad, -c.lr), state


DESCEND = Rule(
    name="descend",
    hyper=DescendHyper,
    rule=descend_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE),),
    sparse=rows_of_sparse,
)


def descend(lr: Scalar) -> Link:
    """Step along the negative update of the stages before: ``p = p - lr * u``.

    Args:
        lr: learning rate, a finite number >= 0 (or a 0-d tensor, or a schedule).

    Returns:
        A link for the end of a :func:`~functional_optim.chain`.

    Raises:
        ValueError: a number outside the bounds above, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, scale_by_sign
        >>> optimizer = chain(scale_by_sign(), descend(lr=0.5))
        >>> params, grads = torch.ones(2), torch.tensor([3.0, -2.0])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([0.5000, 1.5000])
    """
    return DESCEND(lr=lr)
