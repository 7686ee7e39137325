"""Row-wise Adagrad: one accumulator for each row of an embedding table, as in FBGEMM and TorchRec.

    s_t = s_{t-1} + mean(g_t^2)                           (of each row; s_0 = 0)
    p_t = p_{t-1} - lr * g_t / (sqrt(s_t) + eps)          (each row by its own s)

A row is the part of a parameter at one index of the first dimension. In one dimension each element
is a row, and the rule is Adagrad. A 0-d parameter is one row.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.stage import Rule, rows_of_sparse
from functional_optim.numeric import addcdiv, shift
from functional_optim.transforms.weight_decay import WEIGHT_DECAY


class RowwiseAdagradState(NamedTuple):
    sum: Tensor  # s, of shape (rows,), or () for a 0-d parameter, in the parameter's dtype


class RowwiseAdagradHyper(NamedTuple):
    lr: float  # learning rate
    eps: float


class RowwiseAdagradCoefficients(NamedTuple):
    eps: float
    step_size: float  # -lr


def rowwise_adagrad_init(param: Tensor, hyper: RowwiseAdagradHyper) -> RowwiseAdagradState:
    return RowwiseAdagradState(param.new_zeros(param.shape[:1]))


def rowwise_adagrad_coefficients(
    step: float, hyper: RowwiseAdagradHyper
) -> RowwiseAdagradCoefficients:
    return RowwiseAdagradCoefficients(hyper.eps, -hyper.lr)


def mean_of_rows(x: Tensor) -> Tensor:
    """Return the mean of each row, of shape (rows,); 0 for rows without elements.

    The tensor is made contiguous first. Then the order of a sum does not depend on strides or on
    the number of rows. The exception is a single row of more than 2^15 elements, which torch splits
    over its threads.
    """
    if x.dim() < 2:
        return x
    rows = x.contiguous().flatten(1)
    return rows.sum(1) / max(1, rows.shape[1])


def rowwise_adagrad_rule(
    param: Tensor, grad: Tensor, state: RowwiseAdagradState, c: RowwiseAdagradCoefficients
) -> tuple[Tensor, RowwiseAdagradState]:
    total = state.sum + mean_of_rows(grad.square())
    denominator = shift(total.sqrt(), c.eps)
    for _ in range(1, grad.dim()):
        denominator = denominator.unsqueeze(-1)
    return addcdiv(param, grad, denominator, c.step_size), RowwiseAdagradState(total)


ROWWISE_ADAGRAD = Rule(
    name="rowwise_adagrad",
    hyper=RowwiseAdagradHyper,
    state=RowwiseAdagradState,
    init=rowwise_adagrad_init,
    state_depends_on=(),
    coefficients=rowwise_adagrad_coefficients,
    rule=rowwise_adagrad_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("eps", NON_NEGATIVE)),
    kind="per_matrix",
    takes_dtensors=True,
    sparse=rows_of_sparse,
)

DECAY_OF_ROWS = replace(WEIGHT_DECAY, sparse=rows_of_sparse)
"""Weight decay that changes only the stored rows of a sparse gradient, as in FBGEMM."""


@constructor
def rowwise_adagrad(
    lr: Scalar = 1e-2, eps: Scalar = 1e-8, weight_decay: Scalar = 0.0, *, maximize: bool = False
) -> Optimizer:
    """Row-wise Adagrad: for embedding tables, with one number of state for each row.

    ``s = s + mean(g^2)`` over each row, then ``p = p - lr * g / (sqrt(s) + eps)``. A row is the
    part of a parameter at one index of the first dimension. In one dimension each element is a row,
    and this is Adagrad. A 0-d parameter is one row.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        eps: added to the root, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0. With a sparse gradient,
            only the stored rows decay.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is ``sum``, of shape ``(rows,)`` and the
        parameter's dtype (in FBGEMM always float32). It needs whole tensors
        (``kind="per_matrix"``), so policies assign whole tables. Sparse gradients (COO, one sparse
        dimension, coalesced or not) change only the rows they store, on the CPU with the bits of
        the dense step. A derivative through the step is NaN for a row whose gradients were all 0,
        since the slope of the root at 0 is infinite. torch has no such class.

    Example::

        >>> import torch
        >>> optimizer = rowwise_adagrad(lr=0.1)
        >>> table = torch.ones(3, 2)
        >>> grad = torch.sparse_coo_tensor(
        ...     [[1]], [[1.0, 7.0]], (3, 2), check_invariants=True)
        >>> table, state = optimizer.update(table, grad, optimizer.init(table))
        >>> table
        tensor([[1.0000, 1.0000],
                [0.9800, 0.8600],
                [1.0000, 1.0000]])
        >>> state.leaves.stages[-1].sum
        tensor([ 0., 25.,  0.])

    Reference:
        ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM and TorchRec, with its L2 weight decay; used for the
        tables of Naumov et al., "Deep learning recommendation model for personalization and
        recommendation systems", arXiv 1906.00091, 2019. Adagrad is Duchi, Hazan, Singer, JMLR 12,
        2011.
    """
    return chain(
        maximized(maximize),
        DECAY_OF_ROWS(weight_decay=weight_decay),
        ROWWISE_ADAGRAD(lr=lr, eps=eps),
    )
