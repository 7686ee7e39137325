"""Kernel that calls torch's fused optimizers, for chains with the same mathematics.

torch's fused optimizers make one pass over memory, without a compiler and without the GIL. They
contract multiplications with additions, and keep bfloat16 values in float32 during a step. So they
round in another way than the reference; :data:`ULPS` bounds the difference of one step.

They support one order: negate the gradient, apply one weight decay, run the rule. This kernel
refuses all other chains, and cases that torch computes wrongly. The calls are in
:mod:`functional_optim.kernels.fused_calls`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import tensors_of
from functional_optim.kernels.kernel import KernelStep
from functional_optim.transforms.decoupled_weight_decay import DECOUPLED_WEIGHT_DECAY
from functional_optim.transforms.maximize import MAXIMIZE
from functional_optim.transforms.weight_decay import WEIGHT_DECAY

ULPS: dict[torch.dtype, float] = {torch.float32: 5.0, torch.float64: 5.0, torch.bfloat16: 3.0}
"""Largest difference between one step and the reference's step from the same finite inputs. The
unit is the last place of the largest magnitude in a tensor (the parameter or a state), before or
after the step. On CUDA, Adam for torch.float32 computes 1 - beta in float32, with an error of up to
a quarter of 1 / (1 - beta) units: 1.3e-5 of the second moment at 0.999. executor="auto" has no such
error. No bound holds for an element whose gradient is nearly cancelled by a coupled weight decay,
because Adam and Adagrad divide by the remainder.
"""


class Before(NamedTuple):
    """Effect of the stages before the rule."""

    maximize: bool
    decay: float
    """Coefficient of the coupled weight decay."""
    factor: float
    """Factor by which the decoupled weight decay multiplies the parameter."""


class Fused(NamedTuple):
    """Fused optimizer of torch, with its variants, as the equivalent of a rule."""

    step: Callable[[Leaf, Before, Sequence[list[Tensor]]], None]
    """``step(one of the leaves, effect of the stages before the rule, columns)`` steps leaves in
    place. The columns are lists of all parameters, all gradients, and each tensor of the state."""
    why_not: Callable[[Leaf, Before], str | None]
    """Returns the reason why this optimizer cannot step a chunk that passes all other checks."""
    decoupled: bool
    """True if there is a variant with decoupled weight decay."""
    dtypes: dict[str, tuple[torch.dtype, ...]]
    """The supported dtypes, by type of device."""
    missing: str | None
    """The reason why this version of torch cannot call it; None if it can."""


class _Chain(NamedTuple):
    """A chain that may have a fused equivalent."""

    fused: Fused
    rule: str
    before: tuple[Stage, ...]


FUSED: dict[Stage, Fused] = {}
"""The rules for which torch has a fused optimizer, registered by the modules of the rules."""

_BEFORE = (MAXIMIZE, WEIGHT_DECAY, DECOUPLED_WEIGHT_DECAY)


def _match_chain(stages: Sequence[Stage]) -> _Chain | str:
    """Return the fused equivalent of a chain, or the reason why there is none."""
    rule = stages[-1].name
    fused = FUSED.get(stages[-1])
    if fused is None:
        return f"torch has no fused {rule}, only {', '.join(one.name for one in FUSED)}"
    if fused.missing is not None:
        return fused.missing
    before = []
    for stage in stages[:-1]:
        if stage not in _BEFORE:
            return f"torch's fused {rule} has no place for {stage.name}"
        # A copied or unpickled stage is equal to ours, but _effects_before compares by identity.
        before.append(_BEFORE[_BEFORE.index(stage)])
    return _Chain(fused, rule, tuple(before))


def _effects_before(chain: _Chain, chunk: Leaf) -> Before | str:
    """Return the effect of the active stages before the rule, or why torch cannot compute it."""
    maximize, decay, factor, decays = False, 0.0, 1.0, 0
    for stage, c in zip(chain.before, chunk.coefficients, strict=False):
        if stage is MAXIMIZE:
            if c.maximize and (maximize or decay):
                return f"torch's fused {chain.rule} negates the gradient once, before weight decay"
            maximize = maximize or c.maximize
        elif c.active:
            decays += 1
            if stage is WEIGHT_DECAY:
                decay = c.weight_decay
            elif chain.fused.decoupled:
                factor = c.factor
            else:
                return f"torch's fused {chain.rule} has no {stage.name}"
    if decays > 1:
        return f"torch's fused {chain.rule} has one weight decay, and {decays} are active"
    if decay and chunk.param.dtype == torch.bfloat16:
        # If weight decay cancels a gradient, the sign of the sum depends on a rounded factor.
        return f"torch's fused {chain.rule} rounds weight_decay in its own way in bfloat16"
    return Before(maximize, decay, factor)


def _unsupported_reason(chain: _Chain, chunk: Leaf) -> str | None:
    """Return the reason why torch cannot step the values and tensors of a chunk."""
    if not isinstance(chunk.step, float):
        return f"torch's fused {chain.rule} takes a number as step count, not a tensor"
    for values in chunk.coefficients:
        for value in values:
            if isinstance(value, Tensor):
                return (
                    f"torch's fused {chain.rule} takes numbers, and a hyper-parameter is a tensor "
                    "that is differentiated"
                )
    param = chunk.param
    dtypes = chain.fused.dtypes.get(param.device.type, ())
    if param.dtype not in dtypes:
        taken = ", ".join(map(str, dtypes)) or "nothing"
        return (
            f"torch's fused {chain.rule} on {param.device.type} is used for {taken}, "
            f"not for {param.dtype}"
        )
    tensors = [param, chunk.grad]
    for value in chunk.states[-1]:
        tensors += value if isinstance(value, list) else [value]
    dtype, count = param.dtype, param.numel()
    for tensor in tensors:
        # torch checks neither: it reads and writes with the length and dtype of the parameter.
        if tensor.dtype != dtype or tensor.numel() != count:
            return (
                f"torch's fused {chain.rule} takes tensors of one dtype and length, got "
                f"{dtype} ({count}) and {tensor.dtype} ({tensor.numel()})"
            )
        if not tensor.is_contiguous():
            return f"torch's fused {chain.rule} takes contiguous tensors"
    return None


def _plan(stages: Sequence[Stage], chunk: Leaf) -> tuple[Fused, Before] | str:
    """Return the fused optimizer and the effects before the rule, or why there is none."""
    chain = _match_chain(stages)
    if isinstance(chain, str):
        return chain
    reason = _unsupported_reason(chain, chunk)
    if reason is not None:
        return reason
    before = _effects_before(chain, chunk)
    if isinstance(before, str):
        return before
    reason = chain.fused.why_not(chunk, before)
    return (chain.fused, before) if reason is None else reason


class FusedKernel:
    """Kernel that calls torch's fused optimizers on accelerators.

    It is not used on the CPU: there, it is not faster than the exact loop, and rounds differently.
    """

    name = "fused"
    exact = True
    """True because the kernel makes no step on the CPU."""

    def is_for(self, chunk: Leaf) -> bool:
        return chunk.scalars is Scalars.HOST and not chunk.param.is_cpu

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        planned = _plan(stages, chunk)
        return planned if isinstance(planned, str) else None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        return self.bind_lists(stages, chunk, [[one] for one in tensors_of(chunk)])

    def bind_lists(
        self, stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]]
    ) -> KernelStep | str:
        entries = like.entries
        known = None if entries is None else entries.get("fused")
        if known is not None and known[0] is like.hypers:
            planned = known[1]
        else:
            planned = _plan(stages, like)
            # A plan for float64 depends on the step count: see fused_calls.COUNTED.
            if entries is not None and like.param.dtype != torch.float64:
                entries["fused"] = like.hypers, planned
        if isinstance(planned, str):
            return planned
        fused, before = planned
        return lambda totals: fused.step(like, before, columns)

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return self.name
