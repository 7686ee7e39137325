"""Norm constraint on matrices, after each step: Wen, Dang, Lyu, Ma & Liang 2026 (hyperball).

    p = p * r / ||p||

||.|| is the Frobenius norm of a matrix, or the 2-norm of each of its rows. r is the norm that the
parameter had at ``init``, or a given radius. Tensors with fewer than two dimensions do not change.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import FINITE_POSITIVE
from functional_optim.core.dtensors import reduce_partial
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Rule
from functional_optim.numeric import mul, select
from functional_optim.transforms.adaptive_grad_clip import unit_norm
from functional_optim.transforms.scale_by_trust_ratio import norm_of


class ConstrainNormState(NamedTuple):
    # r: shape (), or (rows, 1, ...) with rows=True; float32, or float64 for a float64 parameter
    norm: Tensor


class ConstrainNormHyper(NamedTuple):
    rows: bool  # constrain each row, instead of the whole matrix


class ConstrainNormToHyper(NamedTuple):
    radius: float  # r
    rows: bool  # constrain each row, instead of the whole matrix


def inverse_norms(param: Tensor, rows: bool) -> Tensor:
    """Return 1 / ||p||, and 0 where ||p|| is 0."""
    norm = unit_norm(param) if rows else norm_of(param)
    # The quotient must be finite even where it is not used, or its derivative is NaN.
    return select(1.0 / select(norm, norm == 0.0, 1.0), norm == 0.0, 0.0)


def scale_matrix(param: Tensor, factor: Tensor) -> Tensor:
    """Return the matrix times a factor. Elements with factor 0 do not change."""
    if param.dim() < 2:
        return param
    # Round once: a 16-bit factor would change the norm by up to 0.4 %.
    return (param.to(factor.dtype) * select(factor, factor == 0.0, 1.0)).to(param.dtype)


def constrain_norm_init(param: Tensor, hyper: ConstrainNormHyper) -> ConstrainNormState:
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    norm = unit_norm(param) if hyper.rows else norm_of(param)
    return ConstrainNormState(reduce_partial(norm).to(dtype))


def constrain_norm_rule(
    param: Tensor, grad: Tensor, state: ConstrainNormState, c: ConstrainNormHyper
) -> tuple[Tensor, ConstrainNormState]:
    return scale_matrix(param, state.norm * inverse_norms(param, c.rows)), state


def constrain_norm_to_rule(
    param: Tensor, grad: Tensor, state: NoState, c: ConstrainNormToHyper
) -> tuple[Tensor, NoState]:
    return scale_matrix(param, mul(inverse_norms(param, c.rows), c.radius)), state


CONSTRAIN_NORM = Rule(
    name="constrain_norm",
    hyper=ConstrainNormHyper,
    state=ConstrainNormState,
    init=constrain_norm_init,
    state_depends_on=("rows",),
    rule=constrain_norm_rule,
    uses_gradient=False,
    kind="per_matrix",
    takes_dtensors=True,
)

CONSTRAIN_NORM_TO = Rule(
    name="constrain_norm_to",
    hyper=ConstrainNormToHyper,
    rule=constrain_norm_to_rule,
    uses_gradient=False,
    bounds=(("radius", FINITE_POSITIVE),),
    kind="per_matrix",
    takes_dtensors=True,
)
"""A second stage, which needs no state."""


def constrain_norm(radius: Scalar | None = None, *, rows: bool = False) -> Link:
    """Scale each matrix, or each of its rows, back to a fixed norm after each step.

    ``p = p * r / ||p||``, with ``r`` the norm at ``init``, or ``radius``. Norms are computed in
    double precision. A matrix or row whose norm is 0, now or at ``init``, does not change. Tensors
    with fewer than two dimensions do not change. In a tensor of more than two dimensions, a row is
    all elements that share an index of the first dimension. A complex parameter counts as a real
    one whose last dimension holds real and imaginary parts.

    After updates that are scaled to the norm of the parameter, this is hyperball optimization:
    ``chain(scale_by_adam(), scale_by_trust_ratio(), descend(lr), constrain_norm())``. With
    ``rows=True`` it is row norm control.

    Cost: one reduction per tensor; the state holds one number per tensor, or per row with
    ``rows=True``, and nothing with a radius.

    Args:
        radius: the norm, a finite number > 0; None for the norm at ``init``.
        rows: constrain the norm of each row instead of the matrix's.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule. It needs whole leaves
        (``kind="per_matrix"``).

    Raises:
        ValueError: a radius that is not > 0 and finite.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> params = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> grads = torch.tensor([[-1.0, 0.0], [0.0, -1.0]])
        >>> optimizer = chain(sgd(lr=1.0), constrain_norm(rows=True))
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([[3., 0.],
                [0., 1.]])

    Reference:
        Wen, Dang, Lyu, Ma, Liang, "Fantastic pretraining optimizers and where to find them II:
        hyperball optimization", 2026 (arXiv 2606.16899); Salimans & Kingma, "Weight normalization",
        NeurIPS 2016, equation 2 (a norm per row apart from its direction).
    """
    if radius is None:
        return CONSTRAIN_NORM(rows=rows)
    return CONSTRAIN_NORM_TO(radius=radius, rows=rows)
