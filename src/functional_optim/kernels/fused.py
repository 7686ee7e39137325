"""The fused kernel: torch's hand-written optimizer kernels, where a chain is the same mathematics.

They make one pass over memory without a compiler and without the GIL. They contract
multiplications with additions, and keep bfloat16 in float32 between the operations of a step, so
they round otherwise than the reference; :data:`ULPS` says how far one step may part from it.

They know one order of things: the gradient is negated, one weight decay acts, then the rule. A
chain that is anything else is refused, and so is what they get wrong. The calls themselves are in
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
"""How far one step may be from the reference executor's, made from the same finite inputs.

In units in the last place of the largest magnitude in the tensor (the parameter, or one of its
states), before the step or after it. On CUDA, Adam for torch.float32 takes 1 - beta in float32,
which is off by up to a quarter of 1 / (1 - beta) of them: 1.3e-5 of the second moment at 0.999,
which executor="eager" does not part by. What no bound covers: an element whose gradient a coupled
weight decay cancels to the last digits, since Adam and Adagrad then divide by what is left.
"""


class Before(NamedTuple):
    """Effect of the stages before the rule."""

    maximize: bool
    decay: float
    """Coefficient of the coupled weight decay."""
    factor: float
    """What the decoupled weight decay multiplies the parameter by."""


class Fused(NamedTuple):
    """Fused kernel of torch, with its variants, as the equivalent of a rule."""

    step: Callable[[Leaf, Before, Sequence[list[Tensor]]], None]
    """Steps leaves that are not refused, in place: ``step(one of them, what comes before, all
    parameters, all gradients and all of each tensor of the state)``."""
    why_not: Callable[[Leaf, Before], str | None]
    """Why this kernel in particular cannot step a chunk that all others could."""
    decoupled: bool
    """Whether there is a variant with decoupled weight decay."""
    dtypes: dict[str, tuple[torch.dtype, ...]]
    """The dtypes it is used for, by type of device."""
    missing: str | None
    """Why this torch cannot call it."""


class _Chain(NamedTuple):
    """A chain that may have a fused equivalent."""

    fused: Fused
    rule: str
    before: tuple[Stage, ...]


FUSED: dict[Stage, Fused] = {}
"""The rules that torch has a fused kernel for, filled in by what knows algorithms."""

_BEFORE = (MAXIMIZE, WEIGHT_DECAY, DECOUPLED_WEIGHT_DECAY)


def _recognise(stages: Sequence[Stage]) -> _Chain | str:
    """The kernel for a chain, or why there is none."""
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
        # A stage that was copied or pickled is equal to ours: ours can be told by identity.
        before.append(_BEFORE[_BEFORE.index(stage)])
    return _Chain(fused, rule, tuple(before))


def _before(chain: _Chain, chunk: Leaf) -> Before | str:
    """Return the effect of the active stages before the rule, or why the kernel has none such."""
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
        # Where it cancels a gradient, the sign of the sum depends on how the factor is rounded.
        return f"torch's fused {chain.rule} rounds weight_decay in its own way in bfloat16"
    return Before(maximize, decay, factor)


def _unfit(chain: _Chain, chunk: Leaf) -> str | None:
    """Return why the kernel does not take a chunk's values and tensors."""
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
        # The kernels check neither: they read and write by the parameter's length and dtype.
        if tensor.dtype != dtype or tensor.numel() != count:
            return (
                f"torch's fused {chain.rule} takes tensors of one dtype and length, got "
                f"{dtype} ({count}) and {tensor.dtype} ({tensor.numel()})"
            )
        if not tensor.is_contiguous():
            return f"torch's fused {chain.rule} takes contiguous tensors"
    return None


def _planned(stages: Sequence[Stage], chunk: Leaf) -> tuple[Fused, Before] | str:
    """The kernel and what it is to do before the rule, or why there is none."""
    chain = _recognise(stages)
    if isinstance(chain, str):
        return chain
    unfit = _unfit(chain, chunk)
    if unfit is not None:
        return unfit
    before = _before(chain, chunk)
    if isinstance(before, str):
        return before
    reason = chain.fused.why_not(chunk, before)
    return (chain.fused, before) if reason is None else reason


class FusedKernel:
    """Kernel that calls torch's fused optimizers on accelerators.

    On the CPU they are no faster than the exact loop, and round in another way, so there the kernel
    takes no chunk.
    """

    called = "fused"
    exact = True
    """Vacuous: the kernel makes no step on the CPU."""

    def is_for(self, chunk: Leaf) -> bool:
        return chunk.scalars is Scalars.HOST and not chunk.param.is_cpu

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        planned = _planned(stages, chunk)
        return planned if isinstance(planned, str) else None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        return self.bind_lists(stages, chunk, [[one] for one in tensors_of(chunk)])

    def bind_lists(
        self, stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]]
    ) -> KernelStep | str:
        """Bind a step of lists of tensors; a chunk is a list of one."""
        entries = like.entries
        known = None if entries is None else entries.get("fused")
        if known is not None and known[0] is like.hypers:
            planned = known[1]
        else:
            planned = _planned(stages, like)
            # In double precision a plan holds up to some number of steps only.
            if entries is not None and like.param.dtype != torch.float64:
                entries["fused"] = like.hypers, planned
        if isinstance(planned, str):
            return planned
        fused, before = planned
        return lambda totals: fused.step(like, before, columns)

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return self.called
