"""Clipping by global norm: Pascanu, Mikolov & Bengio 2013, algorithm 1.

n = sqrt(sum over all tensors of sum g^2)
g = g * min(1, c / (n + 1e-6))               (1e-6 as in torch.nn.utils.clip_grad_norm_)

Chains, ``clip_grad_norm_`` and ``max_norm`` of the front-ends all use these functions. NaN and
infinity are treated as in torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_vector_norm
from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.leaf import PLAIN
from functional_optim.core.stage import Link, NoState, Transform, rows_of_sparse
from functional_optim.native import LOOPS, native_squares


class ClipByGlobalNormHyper(NamedTuple):
    max_norm: float  # c


BLOCK = 3 << 13
"""Number of elements that are squared at a time. torch copies them to float64, and the copy fits
into a cache. Above 2^15 elements torch computes one sum per thread, so the result would depend on
the number of threads."""


def sum_of_squares(grad: Tensor) -> Tensor:
    """Return the sum of squares in double precision."""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips only this condition
        # Other tensors, and compilers, need no copy. The size is last: a compiler may not know it.
        if (
            type(grad) in PLAIN
            and grad.is_cpu
            and grad.dtype != torch.float64
            and not torch.compiler.is_compiling()
            and grad.numel() > BLOCK
        ):
            is_fixed = not (grad.requires_grad and torch.is_grad_enabled())
            found = native_squares([grad], BLOCK) if is_fixed and LOOPS.loaded is not None else None
            if found is not None:
                return torch.tensor(found, dtype=torch.float64, device="cpu").sum()
            return torch.stack([*map(sum_of_squares, grad.reshape(-1).split(BLOCK))]).sum()
    square: Tensor = torch.linalg.vector_norm(grad, 2.0, dtype=torch.float64).square()
    return square


def squares_of_each(grads: list[Tensor]) -> Tensor:
    """Return :func:`sum_of_squares` of each gradient, with the same bits, in one tensor."""
    found = None if LOOPS.loaded is None else native_squares(grads, BLOCK)
    if found is not None:
        squares = torch.tensor(found, dtype=torch.float64, device="cpu")
        if len(found) == len(grads):
            return squares
        parts = squares.split([max(1, -(-one.numel() // BLOCK)) for one in grads])
        return torch.stack([one.sum() for one in parts])
    if not grads[0].is_cpu or max(map(Tensor.numel, grads)) <= BLOCK:
        return torch.stack(foreach_vector_norm(grads, dtype=torch.float64)).square()
    large = [k for k, one in enumerate(grads) if one.numel() > BLOCK]
    rest = [k for k, one in enumerate(grads) if one.numel() <= BLOCK]
    squares = torch.empty(len(grads), dtype=torch.float64, device=grads[0].device)
    if rest:
        squares[rest] = squares_of_each([grads[k] for k in rest])
    for k in large:
        squares[k] = sum_of_squares(grads[k])
    return squares


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Return ``min(1, c / (n + 1e-6))``, the factor that limits the norm n of gradients to c.

    It is NaN if the norm is NaN, and if the norm and the limit are both infinite. For a number it
    is a number.
    """
    if isinstance(norm, float):  # a proxy for a tensor in a graph is not a Tensor either
        # In this order min keeps NaN, like clamp.
        return min(max_norm / (norm + 1e-6), 1.0)
    # ``max_norm / tensor`` computes this in two Python functions of torch.
    return ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0)


def clip_by_global_norm_transform(
    grad: Tensor, param: Tensor, state: NoState, c: ClipByGlobalNormHyper, total: Tensor
) -> tuple[Tensor, NoState]:
    # The slope of the root at 0 is infinite. The root of 1e-300 is negligible beside 1e-6.
    norm = total.clamp(min=1e-300).sqrt()
    return grad * clip_factor(c.max_norm, norm).to(grad.dtype), state


CLIP_BY_GLOBAL_NORM = Transform(
    name="clip_by_global_norm",
    hyper=ClipByGlobalNormHyper,
    transform=clip_by_global_norm_transform,
    measure=sum_of_squares,
    measure_each=squares_of_each,
    bounds=(("max_norm", NON_NEGATIVE),),
    sparse=rows_of_sparse,
)


def clip_by_global_norm(max_norm: Scalar) -> Link:
    """Scale all gradients by one factor if their joint 2-norm exceeds ``max_norm``.

    The norm is over all leaves that have a gradient, in double precision. As in torch, NaN in one
    gradient makes all gradients NaN, and an infinity makes all finite elements 0.
    :func:`~functional_optim.apply_if_finite` before this link skips such a step.

    Args:
        max_norm: the largest norm that passes unscaled, a number >= 0.

    Returns:
        A link for :func:`~functional_optim.chain`. It equals torch.nn.utils.clip_grad_norm_, up to
        rounding of the norm.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
        >>> params = {"a": torch.zeros(1), "b": torch.zeros(1)}
        >>> grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        {'a': tensor([-0.6000]), 'b': tensor([-0.8000])}

    Reference:
        Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
        ICML 2013, algorithm 1.
    """
    return CLIP_BY_GLOBAL_NORM(max_norm=max_norm)
