"""SparseAdam: Adam on the rows that a sparse gradient stores, as in torch.optim.SparseAdam.

    m_t = m_{t-1} + (1 - b1) * (g_t - m_{t-1})                       (in the rows of g_t only)
    v_t = v_{t-1} + (1 - b2) * (g_t^2 - v_{t-1})                     (the same)
    p_t = p_{t-1} - lr * sqrt(1 - b2^t) / (1 - b1^t) * m_t / (sqrt(v_t) + eps)       (the same)

t counts the steps of the parameter, whichever rows they had.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_POSITIVE, POSITIVE
from functional_optim.core.stage import Rule, rows_of_sparse
from functional_optim.numeric import mul, root, shift


class SparseAdamState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, the same


class SparseAdamHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    takes_dense: bool  # True: a dense gradient is allowed, and stores all rows


class SparseAdamCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    weight_2: float  # 1 - b2
    eps: float
    step_size: float  # -lr * sqrt(1 - b2^t) / (1 - b1^t)


def sparse_adam_coefficients(step: float, hyper: SparseAdamHyper) -> SparseAdamCoefficients:
    beta_1, beta_2 = hyper.betas
    step_size = hyper.lr * root(1 - beta_2**step) / (1 - beta_1**step)
    return SparseAdamCoefficients(1 - beta_1, 1 - beta_2, hyper.eps, -step_size)


def sparse_adam_rule(
    param: Tensor, grad: Tensor, state: SparseAdamState, c: SparseAdamCoefficients
) -> tuple[Tensor, SparseAdamState]:
    exp_avg = state.exp_avg + mul(grad - state.exp_avg, c.weight_1)
    exp_avg_sq = state.exp_avg_sq + mul(grad.square() - state.exp_avg_sq, c.weight_2)
    direction = exp_avg / shift(exp_avg_sq.sqrt(), c.eps)
    return param + mul(direction, c.step_size), SparseAdamState(exp_avg, exp_avg_sq)


def sparse_adam_dense(hyper: SparseAdamHyper) -> bool:
    return hyper.takes_dense


SPARSE_ADAM = Rule(
    name="sparse_adam",
    hyper=SparseAdamHyper,
    state=SparseAdamState,
    coefficients=sparse_adam_coefficients,
    rule=sparse_adam_rule,
    bounds=(("lr", FINITE_POSITIVE), ("betas", BELOW_ONE), ("eps", POSITIVE)),
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sparse=rows_of_sparse,
    dense=sparse_adam_dense,
)


@constructor
def sparse_adam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    *,
    maximize: bool = False,
    takes_dense: bool = False,
) -> Optimizer:
    """SparseAdam: Adam on the rows that a sparse gradient stores. All other rows do not change.

    ``p = p - lr * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + eps)`` in those rows, with
    averages ``m, v`` of their gradients. For embedding tables, such as
    ``nn.Embedding(sparse=True)``.

    Args:
        lr: learning rate, a finite number > 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root of ``v``, before its bias correction, > 0.
        maximize: ascend instead of descend.
        takes_dense: also take a dense gradient, as a sparse gradient that stores all rows. Without
            it, ``update``, ``update_`` and the front-ends raise RuntimeError for a dense gradient,
            as torch.optim.SparseAdam does.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.SparseAdam, which has no
        ``takes_dense``. Its state is two dense tensors of the parameter's shape and dtype. The cost
        of a step is proportional to the stored rows. It takes no complex parameters.

    Example::

        >>> import torch
        >>> optimizer = sparse_adam(lr=0.1)
        >>> table = torch.ones(3, 2)
        >>> grad = torch.sparse_coo_tensor(
        ...     [[1]], [[3.0, -2.0]], (3, 2), check_invariants=True)
        >>> table, state = optimizer.update(table, grad, optimizer.init(table))
        >>> table
        tensor([[1.0000, 1.0000],
                [0.9000, 1.1000],
                [1.0000, 1.0000]])

    Reference:
        torch.optim.SparseAdam, after Kingma & Ba, "Adam: a method for stochastic optimization",
        ICLR 2015, algorithm 1.
    """
    return chain(
        maximized(maximize), SPARSE_ADAM(lr=lr, betas=betas, eps=eps, takes_dense=takes_dense)
    )
