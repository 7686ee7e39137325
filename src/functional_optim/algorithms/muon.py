"""Muon: momentum whose steps are orthogonal matrices; Jordan et al. 2024.

    m_t = mu * m_{t-1} + (1 - mu) * g_t
    u_t = m_t, or with Nesterov momentum (1 - mu) * g_t + mu * m_t
    X_0 = u_t / max(|u_t|_F, eps)
    X_k = a * X_{k-1} + (b * A + c * A A) X_{k-1},   A = X_{k-1} X_{k-1}^T,   k = 1 .. ns_steps
    p_t = (1 - lr * lambda) * p_{t-1} - lr * r(shape) * X_{ns_steps}

The polynomial moves every singular value close to 1 (Newton-Schulz). As in torch.optim, it is
computed in bfloat16, with the shorter side first. For a matrix of A rows and B columns, r is
sqrt(max(1, A / B)), or 0.2 * sqrt(max(A, B)) to match the size of AdamW's steps.

This rule is torch.optim.Muon bit for bit. The conventions of other implementations are options of
``muon``, which select the rule of :mod:`functional_optim.algorithms.muon_options`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.muon_options import MUON_OPTIONS, encode_sizes
from functional_optim.algorithms.polar import SCALES, PolarFactor, encode_polar, iterate, scale_of
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor
from functional_optim.bounds import ANY, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval, check_choice
from functional_optim.core.aliasing import match_strides
from functional_optim.core.matrices import iteration_flops, norms, require_matrix
from functional_optim.core.scalars import product_in, scalar_dtype
from functional_optim.numeric import add, clamp, lerp, mul


class MuonState(NamedTuple):
    momentum_buffer: Tensor  # m, of the parameter's shape and dtype


class MuonHyper(NamedTuple):
    lr: float  # learning rate
    weight_decay: float  # lambda
    momentum: float  # mu
    nesterov: bool
    ns_coefficients: tuple[float, float, float]  # a, b, c
    eps: float  # least divisor
    ns_steps: int  # Newton-Schulz iterations
    adjust_lr_fn: str | None  # "original" (or None) or "match_rms_adamw": r


class MuonCoefficients(NamedTuple):
    decay: float  # 1 - lr * lambda
    weight: float  # 1 - mu
    momentum: float  # mu
    nesterov: bool
    ns_coefficients: tuple[float, float, float]  # a, b, c
    eps: float
    ns_steps: int
    lr: float
    lr_dtype: str  # dtype of a tensor lr, in which torch.optim.Muon multiplies; else "float64"
    match_rms_adamw: bool


def muon_init(param: Tensor, hyper: MuonHyper) -> MuonState:
    require_matrix("muon", param)
    return MuonState(torch.zeros_like(param))


def muon_flops(shape: tuple[int, ...], hyper: MuonHyper) -> int:
    return hyper.ns_steps * iteration_flops(shape[0], shape[1], cubic=False)


def muon_check(hyper: MuonHyper) -> None:
    check_choice("muon", "adjust_lr_fn", hyper.adjust_lr_fn, (None, "original", "match_rms_adamw"))


def muon_coefficients(step: float, hyper: MuonHyper) -> MuonCoefficients:
    name = hyper.adjust_lr_fn
    return MuonCoefficients(
        1 - hyper.lr * hyper.weight_decay,
        1 - hyper.momentum,
        hyper.momentum,
        hyper.nesterov,
        hyper.ns_coefficients,
        hyper.eps,
        hyper.ns_steps,
        hyper.lr,
        scalar_dtype(hyper.lr),
        name is not None and name == "match_rms_adamw",  # TorchScript needs the check for None
    )


def muon_rule(
    param: Tensor, grad: Tensor, state: MuonState, c: MuonCoefficients
) -> tuple[Tensor, MuonState]:
    buffer = lerp(state.momentum_buffer, grad, c.weight)
    update = lerp(grad, buffer, c.momentum) if c.nesterov else buffer
    coarse = update.to(torch.bfloat16)
    unit = coarse / clamp(norms(coarse), c.eps, math.inf)
    if not c.nesterov and buffer.dtype == unit.dtype:
        # torch.optim.Muon divides by the norm in place, and here it writes to the buffer.
        buffer = unit
    step = iterate(unit, [c.ns_coefficients] * c.ns_steps, False, True)
    scale = "match_rms_adamw" if c.match_rms_adamw else "original"
    ratio = scale_of(param.size(-2), param.size(-1), scale)
    shrunk = match_strides(mul(param, c.decay), param)
    new = add(shrunk, step, -product_in(c.lr, ratio, c.lr_dtype)).to(param.dtype)
    return new, MuonState(buffer)


MUON = Rule(
    name="muon",
    hyper=MuonHyper,
    state=MuonState,
    init=muon_init,
    state_depends_on=(),
    coefficients=muon_coefficients,
    rule=muon_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("weight_decay", NON_NEGATIVE),
        ("momentum", NON_NEGATIVE),
        ("ns_coefficients", ANY),
        ("eps", ANY),
        ("ns_steps", Interval(low=0, high=99)),
    ),
    check=muon_check,
    kind="per_matrix",
    flops=muon_flops,
    stacked=True,
    as_gradient=("momentum_buffer",),
)


@constructor
def muon(
    lr: Scalar = 1e-3,
    weight_decay: Scalar = 0.1,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[Scalar, Scalar, Scalar] = (3.4445, -4.7750, 2.0315),
    eps: Scalar = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    polar: PolarFactor | Sequence[Sequence[float]] | str | None = None,
    iteration_dtype: str | None = None,
    normalization: str | None = None,
    fused_products: bool = True,
    row_blocks: int = 1,
    split_sizes: Sequence[int] | str | None = None,
    batch_axes: int = 0,
    column_axes: int = 1,
) -> Optimizer:
    """Muon: momentum whose steps are made orthogonal, for the matrices of hidden layers.

    ``p = (1 - lr * weight_decay) * p - lr * r * orthogonalised(u)``, where ``u`` is the momentum of
    the gradient. The Newton-Schulz iteration moves all singular values of ``u`` close to 1. ``r``
    is a factor that depends on the shape. State: one number per parameter. Cost: three products of
    matrices per iteration.

    The arguments up to ``adjust_lr_fn`` are those of torch.optim.Muon. The options after it are
    the conventions in which implementations differ. Keller Jordan's Muon is
    ``muon(0.02, 0.0, adjust_lr_fn="keller", normalization="add", fused_products=False)``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        weight_decay: coefficient of the decoupled decay, >= 0.
        momentum: decay of the average of gradients, >= 0.
        nesterov: look ahead: ``u`` is ``(1 - momentum) * g + momentum * m``.
        ns_coefficients: ``(a, b, c)`` of the polynomial ``a x + b x^3 + c x^5`` that is applied to
            singular values.
        eps: least divisor of a matrix.
        ns_steps: number of times that the polynomial is applied, a whole number from 0 to 99.
        adjust_lr_fn: name of the factor ``r`` for a matrix of the shape (rows, columns):

            - "original" (or None): ``sqrt(max(1, rows / columns))``, a factor of ``lr``
              (torch.optim.Muon, and "shape_scaling" of NVIDIA's Emerging-Optimizers);
            - "keller": the same number, by which the orthogonal matrix is multiplied in its own
              dtype (Keller Jordan's Muon);
            - "match_rms_adamw": ``0.2 * sqrt(max(rows, columns))``, for learning rates and decays
              that were tuned for AdamW (Moonlight, and "rms_norm" of the Dion package);
            - "spectral": ``sqrt(rows / columns)`` (Scion, "spectral_norm" of the Dion package, and
              "unit_rms_norm" of Emerging-Optimizers);
            - "max_side": ``sqrt(max(rows, columns))`` ("spectral" of Emerging-Optimizers);
            - "unscaled": 1.
        polar: the polynomial of each iteration, in place of ``ns_coefficients`` and ``ns_steps``: a
            :class:`~functional_optim.PolarFactor`, such as ``PolarFactor.polar_express()``.
        iteration_dtype: dtype of the iteration: "bfloat16" (or None), "float16", "float32",
            "float64", or "parameter" for the dtype of the momentum.
        normalization: division by the Frobenius norm before the iteration: "clamp" (or None) by
            ``max(norm, eps)`` (torch.optim.Muon); "add" by ``norm + eps`` (Keller Jordan, Moonlight
            and the Dion package); "before_cast" by ``max(norm, eps)`` in the dtype of the momentum
            (Emerging-Optimizers, heavyball). The other two compute the norm in ``iteration_dtype``.
        fused_products: round ``b * A + c * A A`` once, as torch.optim.Muon does; False rounds each
            product and each sum, as Keller Jordan's Muon does.
        row_blocks: number of equal blocks of rows that are orthogonalized separately, such as the
            heads of an attention matrix.
        split_sizes: number of rows of each block, if they differ, such as for Q, K and V.
        batch_axes: number of leading axes over which matrices are stacked, such as experts.
        column_axes: number of last axes that are the columns of a matrix: 3 for the kernels of a
            two-dimensional convolution.

    Returns:
        An :class:`~functional_optim.Optimizer`; without the options, bit for bit torch.optim.Muon.
        It needs whole tensors (``kind="per_matrix"``), and they are real matrices: its ``init``
        raises ValueError for a parameter of another number of dimensions, or if the blocks do not
        divide its rows. Without options, the buffer of a bfloat16 parameter is divided by its norm
        at each step if ``nesterov`` is False, as in torch. A parameter without columns stays empty,
        where torch.optim.Muon raises ZeroDivisionError.

    Example::

        >>> import torch
        >>> optimizer = muon(lr=0.5, weight_decay=0.0)
        >>> weight = torch.zeros(2, 2)
        >>> grad = torch.tensor([[3.0, 0.0], [0.0, -3.0]])
        >>> weight, state = optimizer.update(weight, grad, optimizer.init(weight))
        >>> weight.sign()
        tensor([[-1.,  0.],
                [ 0.,  1.]])

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the factor
        for AdamW's learning rates is that of Liu et al., "Muon is scalable for LLM training",
        arXiv 2502.16982, 2025, section 2.2.
    """
    unset = all(one is None for one in (polar, iteration_dtype, normalization, split_sizes))
    counts = (row_blocks, batch_axes, column_axes)
    not_in_torch = {*SCALES} - {"original", "match_rms_adamw"}
    has_options = not unset or fused_products is not True or counts != (1, 0, 1)
    if not has_options and adjust_lr_fn not in not_in_torch:
        return chain(
            MUON(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=ns_coefficients,
                eps=eps,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            )
        )
    return chain(
        MUON_OPTIONS(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            eps=eps,
            adjust_lr_fn=adjust_lr_fn,
            polar=encode_polar(polar, ns_steps, ns_coefficients),
            iteration_dtype=iteration_dtype or "bfloat16",
            normalization=normalization or "clamp",
            fused_products=fused_products,
            row_blocks=row_blocks,
            split_sizes=encode_sizes(split_sizes),
            batch_axes=batch_axes,
            column_axes=column_axes,
        )
    )
