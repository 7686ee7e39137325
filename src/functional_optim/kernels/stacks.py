"""Stacks: leaves of one shape that are stepped together, as one larger tensor.

A call costs more than the product of two small matrices. In a stack, a few batched products step
hundreds of them. The step equals the reference bit for bit if torch's batched products round as its
single products. Each kind of stack is tested for this on random numbers: see :data:`EVIDENCE`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_copy_
from functional_optim.core.bit_equality import same_bits
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state, state_tensors
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import UNCHUNKABLE, tensors_of, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.leaf_program import step_leaf
from functional_optim.kernels.scratch import scratch
from functional_optim.kernels.signature import signature

STACK = 1 << 19
"""Largest number of parameter elements in one stack, so that temporaries stay in the cache."""

STACK_ON_DEVICES = 1 << 25
"""Largest number on accelerators, where launches cost most, and memory limits temporaries."""

EVIDENCE = 1 << 20
"""Number of elements that must equal the reference before a kind of stack is used.

For bfloat16 matrices of at most 16 x 16, torch's batched products round about one element in 10^5
to 10^6 differently from single products.
"""

SMALLEST = 1 << 9
"""Smallest number of elements of a leaf in a stack: smaller leaves gain nothing."""


class _Evidence:
    """Trials of one kind of stack: steps from random numbers, in a stack and one by one.

    Each step of such a stack makes at most one trial, so that no single step pays for all trials.
    """

    def __init__(self) -> None:
        self._trials = 0
        self._differs = False

    def is_open(self, stack: Sequence[Leaf]) -> bool:
        """Return True if trials are missing, and all trials so far were equal."""
        wanted = max(2, -(-EVIDENCE // (len(stack) * stack[0].param.numel())))
        return not self._differs and self._trials < wanted

    def is_enough(self, stages: Sequence[Stage], stack: Sequence[Leaf]) -> bool:
        """Make a trial if trials are missing; return True if all trials were made and equal."""
        if self.is_open(stack):
            is_equal = _is_equal(stages, stack, self._trials)
            self._differs = is_equal is False
            self._trials += is_equal is not None
        return not self._differs and not self.is_open(stack)


_EVIDENCE: Cache[_Evidence] = Cache()
"""The evidence for each kind of stack."""


class StackPlan(NamedTuple):
    """Division of leaves into stacks, by their positions."""

    together: Sequence[Sequence[int]]
    """The leaves of each stack."""
    alone: Sequence[int]
    """The leaves that are stepped one by one."""
    is_final: bool
    """True if later steps divide the same leaves in the same way."""


def plan_stacks(stages: Sequence[Stage], leaves: Sequence[Leaf]) -> StackPlan:
    """Divide leaves of one chain into stacks, if the bits are equal, and leaves stepped alone.

    A kind of stack that lacks evidence gets a trial.
    """
    alone: list[int] = []
    together, is_final = [], True
    for group in _group_leaves(stages, leaves, alone):
        for places in _split_group(leaves[group[0]].param, group):
            stack = [leaves[place] for place in places]
            evidence = _evidence_of(stages, stack) if len(stack) > 1 else None
            if evidence is not None and evidence.is_enough(stages, stack):
                together.append(places)
            else:
                alone += places
                is_final &= evidence is None or not evidence.is_open(stack)
    return StackPlan(together, alone, is_final)


def _evidence_of(stages: Sequence[Stage], stack: Sequence[Leaf]) -> _Evidence | None:
    """Return the evidence for stacks of this kind; None if the kind is never used."""
    if stack[0].param.numel() < SMALLEST:
        return None
    try:
        static, _, _ = signature(stages, stack[0])
    except UntraceableError:
        return None
    key = (tuple(stages), static, len(stack), torch.get_num_threads(), _kind(stack[0]))
    return _EVIDENCE.get_or_make(key, _Evidence)


def why_not_stacked(stages: Sequence[Stage]) -> str | None:
    """Return the reason why leaves of one shape cannot be stepped together; None if they can."""
    for stage in stages:
        if stage.kind == "per_matrix" and not stage.stacked:
            return f"{stage.name} does not say that its matrices may be stacked"
        if stage.granularity > 1:
            return f"{stage.name} works on blocks of a tensor"
    return UNCHUNKABLE.get(tuple(stages))


def _group_leaves(
    stages: Sequence[Stage], leaves: Sequence[Leaf], alone: list[int]
) -> Iterator[list[int]]:
    """Yield the positions of leaves that may be stacked; add all other positions to ``alone``."""
    if why_not_stacked(stages) is not None:
        alone += range(len(leaves))
        return
    count = Counter([leaf.param.shape for leaf in leaves])
    found: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        several = count[leaf.param.shape] > 1
        if several and leaf.param.numel() and _can_stack(stages, leaf):
            found.setdefault((id(leaf.coefficients), _kind(leaf)), []).append(place)
        else:
            alone.append(place)
    yield from found.values()


def _can_stack(stages: Sequence[Stage], leaf: Leaf) -> bool:
    """Return True if a leaf is contiguous, and pointwise stages have states of its shape only."""
    shapes = {
        tensor.shape
        for stage, state in zip(stages, leaf.states, strict=True)
        if stage.kind == "pointwise"
        for tensor in state_tensors((state,))
    }
    tensors = tensors_of(leaf)
    plain = all(one.is_contiguous() and not one.is_conj() and not one.is_neg() for one in tensors)
    return plain and shapes <= {leaf.param.shape}


def _kind(leaf: Leaf) -> tuple[Any, ...]:
    return tuple((one.shape, one.dtype, one.device) for one in tensors_of(leaf))


def _split_group(like: Tensor, group: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split a group into stacks of 2^k leaves each, so that there are few kinds of stacks."""
    most = max(1, (STACK if like.is_cpu else STACK_ON_DEVICES) // like.numel())
    start = 0
    while start < len(group):
        count = 1 << (min(most, len(group) - start).bit_length() - 1)
        yield group[start : start + count]
        start += count


def step_stack(stages: Sequence[Stage], stack: Sequence[Leaf], totals: Sequence[Tensor]) -> None:
    """Step leaves of one kind in a stack, and copy the results to each leaf."""

    def step(whole: list[Tensor]) -> None:
        step_leaf(stages, with_tensors(stack[0], whole), totals)

    step_columns(columns_of(stack), step)


def columns_of(stack: Sequence[Leaf]) -> list[list[Tensor]]:
    """Return a list of all parameters, one of all gradients, and one for each state tensor."""
    return [list(column) for column in zip(*map(tensors_of, stack), strict=True)]


def step_columns(columns: Sequence[list[Tensor]], step: Callable[[list[Tensor]], object]) -> None:
    """Stack leaves, step the stack in place by ``step``, and copy the results back."""
    whole = stack_columns(columns)
    step(whole)
    for place, (targets, values) in enumerate(zip(columns, whole, strict=True)):
        if place != 1:  # the gradient is only read
            foreach_copy_(targets, list(values.unbind(0)))


def stack_columns(columns: Sequence[list[Tensor]]) -> list[Tensor]:
    """Stack the tensors of each column, in scratch."""
    stacks = []
    for k, column in enumerate(columns):
        one = column[0]
        piece = scratch(("stack", k), len(column) * one.numel(), one.dtype, one.device)
        stacks.append(torch.stack(list(column), out=piece.view(len(column), *one.shape)))
    return stacks


def _is_equal(stages: Sequence[Stage], stack: Sequence[Leaf], seed: int) -> bool | None:
    """Return True if a step from random numbers has the same bits in a stack and one by one.

    States are random too, because products with zeros and ones, as after ``init``, show no
    rounding. Return None if the step does not change the parameters, as with ``lr=0``: such a step
    is no evidence.
    """
    together, alone = _draw_leaves(stack, seed), _draw_leaves(stack, seed)
    start = alone[0].param.clone()
    totals = [torch.ones((), dtype=torch.float64, device="cpu") for _ in stages]
    step_stack(stages, together, totals)
    for leaf in alone:
        step_leaf(stages, leaf, totals)
    pairs = zip(together, alone, strict=True)
    if not all(all(map(same_bits, tensors_of(a), tensors_of(b))) for a, b in pairs):
        return False
    return None if same_bits(alone[0].param, start) else True


def _draw_leaves(stack: Sequence[Leaf], seed: int) -> list[Leaf]:
    """Return random leaves. Parameters are small, so that a small step changes their bits."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(like: Tensor, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(like.shape, generator=draws, dtype=torch.float32, device="cpu")
        return numbers.mul_(scale).to(like.device, like.dtype)

    return [
        leaf._replace(
            param=drawn(leaf.param, 2.0**-20),
            grad=drawn(leaf.grad),
            states=tuple(map_state(lambda one: drawn(one).abs(), one) for one in leaf.states),
        )
        for leaf in stack
    ]
