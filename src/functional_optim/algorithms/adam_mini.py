"""Adam-mini: Zhang et al. 2024, algorithm 1: Adam with one second moment for each block.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * mean(g_t^2)             (of each block; v_0 = 0)
    p_t = (1 - lr * lambda) * p_{t-1} - lr / (1 - b1^t) * m_t / (sqrt(v_t) / sqrt(1 - b2^t) + eps)

A block is a range of indices of the first dimension. By default each row of a matrix is a block,
and a tensor of less than two dimensions is one block. That is the paper's partition of a
transformer (algorithm 3: output neurons, tokens, and whole tensors for the rest), except for
queries and keys, which have one block per head. A vector in blocks of one element is AdamW.
Defaults are those of the authors' program.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import (
    AdamCoefficients,
    AdamHyper,
    adam_coefficients,
    adam_denominator,
)
from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.numeric import add, addcdiv, lerp, mul
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class AdamMiniState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of shape (blocks,), in its dtype, or in float32 if that has 16 bits


class AdamMiniHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    blocks: int  # number of equal blocks along the first dimension; 0 for the rows of a matrix


def number_of_blocks(param: Tensor, blocks: int) -> int:
    """Return the number of blocks of a parameter."""
    size = param.size(0) if param.dim() > 0 else 1
    if blocks == 0:
        return size if param.dim() > 1 else 1
    if size % blocks:
        raise ValueError(
            f"adam_mini: blocks must be a divisor of the first dimension, got blocks={blocks} for "
            f"a parameter of shape {tuple(param.shape)}; override(where, blocks=...) gives "
            "parameters other blocks"
        )
    return blocks


def adam_mini_init(param: Tensor, hyper: AdamMiniHyper) -> AdamMiniState:
    zeros = param.new_zeros((number_of_blocks(param, hyper.blocks),))
    return AdamMiniState(torch.zeros_like(param), widen(zeros))


def adam_mini_coefficients(step: float, hyper: AdamMiniHyper) -> AdamCoefficients:
    return adam_coefficients(step, AdamHyper(hyper.lr, hyper.betas, hyper.eps, False))


def mean_square_of_blocks(x: Tensor, blocks: int) -> Tensor:
    """Return the mean square of each of the equal blocks of a tensor, of shape (blocks,).

    The tensor is made contiguous first, so that sums do not depend on strides.
    """
    if x.numel() == 0:
        return x.new_zeros((blocks,))
    return x.contiguous().reshape(blocks, -1).square().mean(1)


def spread_over_blocks(numbers: Tensor, like: Tensor) -> Tensor:
    """Return for each index of the first dimension the number of its block, shaped to broadcast."""
    if like.dim() == 0:
        return numbers.reshape(())
    length = like.size(0) // max(1, numbers.size(0))
    spread = numbers.unsqueeze(1).expand(numbers.size(0), length).reshape(-1)
    for _ in range(1, like.dim()):
        spread = spread.unsqueeze(-1)
    return spread


def adam_mini_rule(
    param: Tensor, grad: Tensor, state: AdamMiniState, c: AdamCoefficients
) -> tuple[Tensor, AdamMiniState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    square = mean_square_of_blocks(widen(grad), state.exp_avg_sq.size(0))
    second = add(mul(state.exp_avg_sq, c.beta_2), square, c.weight_2)
    denominator = adam_denominator(second, c.root, c.eps)
    spread = spread_over_blocks(denominator, param)
    moved = addcdiv(param, exp_avg, spread, c.step_size).to(param.dtype)
    return moved, AdamMiniState(exp_avg, second)


ADAM_MINI = Rule(
    name="adam_mini",
    hyper=AdamMiniHyper,
    state=AdamMiniState,
    init=adam_mini_init,
    state_depends_on=("blocks",),
    coefficients=adam_mini_coefficients,
    rule=adam_mini_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("blocks", Interval(0)),
    ),
    kind="per_matrix",
)


@constructor
def adam_mini(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    blocks: int = 0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Adam-mini: AdamW with one second moment, and so one step size, for each block of a tensor.

    ``p = p - lr * m_hat / (sqrt(v_hat) + eps)`` as in AdamW, but ``v`` averages the mean square of
    the gradient over each block.

    Blocks are a hyper-parameter, and do not depend on names of parameters. To give the queries and
    keys of a transformer one block per head, override them:
    ``adam_mini().override(matching("*.q_proj.weight"), blocks=heads)``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        blocks: number of equal blocks along the first dimension, which it must divide: 1 for the
            whole tensor, the number of heads for queries and keys. With 0, each row of a matrix
            (each index of the first dimension) is a block, and a tensor of less than two
            dimensions is one block.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is one tensor of the parameter's shape
        and dtype, and one number for each block: about 4 bytes per float32 parameter. It needs
        whole tensors (``kind="per_matrix"``). torch has no Adam-mini.

    Raises:
        ValueError: a value outside the bounds above; in ``init``, a first dimension that does not
            divide into ``blocks``.

    Example::

        >>> import torch
        >>> optimizer = adam_mini(lr=0.1)
        >>> weight, grad = torch.ones(2, 2), torch.tensor([[3.0, 3.0], [-4.0, 4.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight
        tensor([[0.9000, 0.9000],
                [1.1000, 0.9000]])
        >>> state.leaves.stages[-1].exp_avg_sq.shape
        torch.Size([2])

    Reference:
        Zhang, Chen, Li, Ding, Wu, Kingma, Ye, Luo, Sun, "Adam-mini: use fewer learning rates to
        gain more", ICLR 2025, arXiv 2406.16793, algorithms 1 and 3.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        ADAM_MINI(lr=lr, betas=betas, eps=eps, blocks=blocks),
    )
