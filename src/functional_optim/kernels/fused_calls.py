"""Calls of torch's fused optimizers.

The arguments are computed from the coefficients. There, a learning rate is always a number, even if
the hyper-parameter is a tensor or a schedule.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from functional_optim._torch.missing_name import why_missing
from functional_optim._torch.operators import fused_adagrad_, fused_adam_, fused_adamw_, fused_sgd_
from functional_optim.core.leaf import Leaf
from functional_optim.kernels.fused_kernel import Before, Fused

COUNTED = 1 << 24
"""Largest step count that float32 represents. Later bias corrections may be off by 6e-8 of them."""


class _StepTensor(threading.local):
    """Step count as a tensor, one per thread. On the CPU, torch reads it before a call returns."""

    def __init__(self) -> None:
        # An inference tensor could not be written outside of inference mode.
        with torch.inference_mode(mode=False):
            self.tensor = torch.zeros((), dtype=torch.float32, device="cpu")
        self.number = 0.0


_STEP = _StepTensor()


def _step_tensor(step: float, device: torch.device) -> Tensor:
    if device.type != "cpu":
        # A kernel that was launched earlier may not have read its tensor yet.
        return torch.full((), step, dtype=torch.float32, device=device)
    if _STEP.number != step:
        _STEP.tensor.fill_(step)
        _STEP.number = step
    return _STEP.tensor


def _why_not_adagrad(chunk: Leaf, before: Before) -> str | None:
    return None


def _why_not_sgd(chunk: Leaf, before: Before) -> str | None:
    reordered = before.decay != 0.0 or chunk.coefficients[-1].active
    if before.maximize and reordered and not chunk.param.is_cpu:
        return (
            f"torch's fused sgd on {chunk.param.device.type} negates after weight decay and "
            "momentum, maximize before them"
        )
    return None


def _sgd(like: Leaf, before: Before, columns: Sequence[list[Tensor]]) -> None:
    c = like.coefficients[-1]
    params, grads, *buffers = columns
    fused_sgd_(
        params,
        grads,
        buffers[0] if c.active else [],
        weight_decay=before.decay,
        momentum=c.momentum if c.active else 0.0,
        lr=c.lr,
        # The coefficients set gain = 1 in the first step. With is_first_step=True, torch would not
        # read the buffer.
        dampening=1.0 - c.gain,
        nesterov=c.nesterov,
        maximize=before.maximize,
        is_first_step=False,
    )


def _adam_lr(chunk: Leaf, step: float) -> float:
    """Return the learning rate from which the coefficient ``step_size`` was computed."""
    lr: float = -chunk.coefficients[-1].step_size * (1 - chunk.hypers[-1].betas[0] ** step)
    return lr


def _adam_decay(lr: float, factor: float) -> float:
    """Return the weight decay for which torch's ``1 - lr * decay`` is the factor."""
    return (1 - factor) / lr if lr else math.inf


def _why_not_adam(chunk: Leaf, before: Before) -> str | None:
    beta_1, beta_2 = chunk.hypers[-1].betas
    if isinstance(beta_1, Tensor) or isinstance(beta_2, Tensor):
        return "torch's fused adam takes numbers, and one of betas is a tensor"
    assert isinstance(chunk.step, float)
    if chunk.step > COUNTED and chunk.param.dtype == torch.float64:
        return f"torch's fused adam counts steps in float32: up to {COUNTED} for torch.float64"
    if before.factor == 1.0:
        return None
    if not math.isfinite(_adam_decay(_adam_lr(chunk, chunk.step), before.factor)):
        return "torch's fused adam multiplies the decay by lr, and lr is 0 where the decay's is not"
    return None


def _adam(like: Leaf, before: Before, columns: Sequence[list[Tensor]]) -> None:
    assert isinstance(like.step, float)
    c, (params, grads, exp_avgs, exp_avg_sqs, *largest) = like.coefficients[-1], columns
    beta_1, beta_2 = like.hypers[-1].betas
    lr = _adam_lr(like, like.step)
    kernel, decay = fused_adam_, before.decay
    if before.factor != 1.0:
        kernel, decay = fused_adamw_, _adam_decay(lr, before.factor)
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        largest[0] if largest else [],
        [_step_tensor(like.step, like.param.device)] * len(params),
        lr=lr,
        beta1=beta_1,
        beta2=beta_2,
        weight_decay=decay,
        eps=c.eps,
        amsgrad=c.amsgrad,
        maximize=before.maximize,
    )


def _adagrad(like: Leaf, before: Before, columns: Sequence[list[Tensor]]) -> None:
    c, (params, grads, sums) = like.coefficients[-1], columns
    fused_adagrad_(
        params,
        grads,
        sums,
        # step_size includes lr_decay, so torch must not apply a decay that depends on the step.
        [_step_tensor(1.0, like.param.device)] * len(params),
        lr=-c.step_size,
        lr_decay=0.0,
        weight_decay=before.decay,
        eps=c.eps,
        maximize=before.maximize,
    )


_WIDE = (torch.float32, torch.float64)
# float16 is not supported. The reference may round an intermediate result to zero, and divide by
# it; torch's fused optimizers keep such results in float32, so no bound on the difference holds.
_ALL = (*_WIDE, torch.bfloat16)

# On the CPU, fused SGD of torch 2.13 for bfloat16 computes full vectors, but does not store them.
FUSED_SGD = Fused(
    _sgd,
    _why_not_sgd,
    decoupled=False,
    dtypes={"cpu": _WIDE, "cuda": _ALL},
    missing=why_missing(fused_sgd_),
)
FUSED_ADAM = Fused(
    _adam,
    _why_not_adam,
    decoupled=True,
    dtypes={"cpu": _ALL, "cuda": _ALL},
    missing=why_missing(fused_adam_, fused_adamw_),
)
FUSED_ADAGRAD = Fused(
    _adagrad,
    _why_not_adagrad,
    decoupled=False,
    dtypes={"cpu": _ALL, "cuda": _ALL},
    missing=why_missing(fused_adagrad_),
)
