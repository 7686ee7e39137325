"""Cautious weight decay: Chen, Li, Liang et al. 2025, algorithm 1.

    u = u + lambda * p        where u * p >= 0, else u

u is the update of the stages before, and the rule after subtracts lr * u. The decay acts on
elements that the update also moves toward 0, and on elements whose update is 0.
"""

from torch import Tensor

from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Transform
from functional_optim.numeric import add, select
from functional_optim.transforms.weight_decay import (
    WeightDecayCoefficients,
    WeightDecayHyper,
    weight_decay_coefficients,
    weight_decay_sparse,
)


def cautious_weight_decay_transform(
    grad: Tensor, param: Tensor, state: NoState, c: WeightDecayCoefficients
) -> tuple[Tensor, NoState]:
    if not c.active:
        return grad, state
    # Use the sign, since a product of two small numbers may round to 0.
    grows = grad * param.sign() < 0.0
    return add(grad, select(param, grows, 0.0), c.weight_decay), state


CAUTIOUS_WEIGHT_DECAY = Transform(
    name="cautious_weight_decay",
    hyper=WeightDecayHyper,
    coefficients=weight_decay_coefficients,
    transform=cautious_weight_decay_transform,
    bounds=(("weight_decay", NON_NEGATIVE),),
    sparse=weight_decay_sparse,
)


def cautious_weight_decay(weight_decay: Scalar) -> Link:
    """Decay only the elements that the update moves toward 0 as well.

    ``u = u + weight_decay * p`` where ``u * p >= 0``. The decay is decoupled: it does not pass
    through momentum, and :func:`~functional_optim.descend` multiplies it by ``lr`` together with
    the update. With ``weight_decay=0`` the update is unchanged.

    Cost: element-wise; no state.

    Args:
        weight_decay: lambda, a number >= 0 (or a 0-d tensor, or a schedule).

    Returns:
        A link for :func:`~functional_optim.chain`. Put it directly before
        :func:`~functional_optim.descend`, and after a transform such as
        :func:`~functional_optim.scale_by_adam` or :func:`~functional_optim.scale_by_lion`.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(cautious_weight_decay(0.5), descend(lr=1.0))
        >>> params, grads = torch.tensor([4.0, 4.0]), torch.tensor([1.0, -1.0])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([1., 5.])

    Reference:
        Chen, Li, Liang et al., "Cautious weight decay", 2025 (arXiv 2510.12402), algorithm 1.
    """
    return CAUTIOUS_WEIGHT_DECAY(weight_decay=weight_decay)
