"""The stacked executor: leaves of one shape are stepped together, as one larger tensor.

Small matrices cost more to call for than to multiply; stacked, hundreds of them are a few batched
products. Where torch's batched product rounds as its plain one does, the step is the reference bit
for bit. Random numbers show whether it does, for each kind of stack: see :data:`EVIDENCE`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state, state_tensors
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import NOTED, aliased_places, tensors_of, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.scratch import scratch
from functional_optim.kernels.signature import signature
from functional_optim.kernels.validate import same_bits
from functional_optim.kernels.whole import WholeLeaves

STACK = 1 << 19
"""Most elements of parameters in one stack: what a step makes of it stays in the cache."""

STACK_ON_DEVICES = 1 << 25
"""The same on accelerators, where it is the launches that count: a few copies of it are memory."""

EVIDENCE = 1 << 20
"""Elements on which a stack must have had the reference's bits, before its bits are trusted.

torch's batched products of small bfloat16 matrices, of 16 x 16 and less, round about one element
in 10^5 to 10^6 otherwise than its single products.
"""

SMALLEST = 1 << 9
"""Fewest elements of a leaf whose stacks may be trusted: smaller ones gain nothing in a stack."""


class _Evidence:
    """The trials of one kind of stack: a step of random numbers, in a stack and one by one.

    Each step of such a stack makes one trial more, so no step waits for all of them.
    """

    def __init__(self) -> None:
        self._trials = 0
        self._differs = False

    def is_open(self, stack: Sequence[Leaf]) -> bool:
        """Return True if another trial may change what is known."""
        return not self._differs and self._trials < self._wanted(stack)

    @staticmethod
    def _wanted(stack: Sequence[Leaf]) -> int:
        return max(2, -(-EVIDENCE // (len(stack) * stack[0].param.numel())))

    def suffices(
        self, one_by_one: WholeLeaves, stages: Sequence[Stage], stack: Sequence[Leaf]
    ) -> bool:
        """Make one trial if some are missing, and return True if all had the reference's bits."""
        if self.is_open(stack):
            is_equal = _is_equal(one_by_one, stages, stack, self._trials)
            self._differs = is_equal is False
            self._trials += is_equal is not None
        return not self._differs and not self.is_open(stack)


_EVIDENCE: Cache[_Evidence] = Cache()
"""The evidence for each kind of stack."""


class Stacks(NamedTuple):
    """Division of leaves into stacks, by their positions."""

    together: Sequence[Sequence[int]]
    """Those that are stepped together."""
    alone: Sequence[int]
    """Those that are stepped one by one."""
    settled: bool
    """Whether the same leaves will be stepped in the same way from now on."""


class StackedExecutor:
    """Steps leaves of one shape in stacks, and all others one by one.

    Leaves are stacked only where that has the reference's bits.
    """

    def __init__(self) -> None:
        self._one_by_one = WholeLeaves()

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], totals: Sequence[Tensor]
    ) -> None:
        """The step, written into the params and states of the leaves.

        Args:
            stages: of the chain.
            leaves: with gradients.
            totals: the sum of each measured stage.
        """
        found = self.stacks_of(stages, leaves)
        for places in found.together:
            stack = [leaves[place] for place in places]
            step_stack(self._one_by_one, stages, stack, totals)
        if found.alone:
            self._one_by_one.update_(stages, [leaves[place] for place in found.alone], totals)

    def stacks_of(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> Stacks:
        """Find out which leaves are stepped together; where evidence is missing, gather some.

        Args:
            stages: of the chain.
            leaves: with gradients and the numbers of a step.
        """
        alone: list[int] = []
        together, settled = [], True
        for group in _groups(stages, leaves, alone):
            for places in _stacks(leaves[group[0]].param, group):
                stack = [leaves[place] for place in places]
                evidence = self._evidence(stages, stack) if len(stack) > 1 else None
                if evidence is not None and evidence.suffices(self._one_by_one, stages, stack):
                    together.append(places)
                else:
                    alone += places
                    settled &= evidence is None or not evidence.is_open(stack)
        return Stacks(together, alone, settled)

    def _evidence(self, stages: Sequence[Stage], stack: Sequence[Leaf]) -> _Evidence | None:
        """Return what is known of stacks of this kind; None if they are never trusted."""
        if stack[0].param.numel() < SMALLEST:
            return None
        try:
            static, _, _ = signature(stages, stack[0])
        except UntraceableError:
            return None
        key = (tuple(stages), static, len(stack), torch.get_num_threads(), _kind(stack[0]))
        return _EVIDENCE.get_or_make(key, _Evidence)


def why_not_stacked(stages: Sequence[Stage]) -> str | None:
    """Return why leaves of one shape cannot be stepped together; None if they can."""
    for stage in stages:
        if stage.kind == "per_matrix" and not stage.stacked:
            return f"{stage.name} does not say that its matrices may be stacked"
        if stage.granularity > 1:
            return f"{stage.name} works on blocks of a tensor"
    return NOTED.get(tuple(stages))


def _groups(
    stages: Sequence[Stage], leaves: Sequence[Leaf], alone: list[int]
) -> Iterator[list[int]]:
    """Leaves that may be stepped together, by position; the others go to ``alone``."""
    if why_not_stacked(stages) is not None:
        alone += range(len(leaves))
        return
    count = Counter([leaf.param.shape for leaf in leaves])
    aliased = aliased_places(leaves) if len(count) < len(leaves) else set()
    found: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        several = count[leaf.param.shape] > 1
        if several and place not in aliased and leaf.param.numel() and _stacks_well(stages, leaf):
            found.setdefault((id(leaf.coefficients), _kind(leaf)), []).append(place)
        else:
            alone.append(place)
    yield from found.values()


def _stacks_well(stages: Sequence[Stage], leaf: Leaf) -> bool:
    """Return True if a leaf is contiguous, and its pointwise states have its shape."""
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


def _stacks(like: Tensor, group: Sequence[int]) -> Iterator[Sequence[int]]:
    """A group in stacks of a power of two each, so that there are few kinds of stacks."""
    most = max(1, (STACK if like.is_cpu else STACK_ON_DEVICES) // like.numel())
    start = 0
    while start < len(group):
        count = 1 << (min(most, len(group) - start).bit_length() - 1)
        yield group[start : start + count]
        start += count


def step_stack(
    one_by_one: WholeLeaves,
    stages: Sequence[Stage],
    stack: Sequence[Leaf],
    totals: Sequence[Tensor],
) -> None:
    """Step leaves of one kind together, and write what becomes of each."""

    def step(whole: list[Tensor]) -> None:
        one_by_one.update_(stages, [with_tensors(stack[0], whole)], totals)

    step_columns(columns_of(stack), step)


def columns_of(stack: Sequence[Leaf]) -> list[list[Tensor]]:
    """Return all parameters, all gradients, and all of each tensor of the state."""
    return [list(column) for column in zip(*map(tensors_of, stack), strict=True)]


def step_columns(columns: Sequence[list[Tensor]], step: Callable[[list[Tensor]], object]) -> None:
    """Bring leaves together, step them as one, and bring the results back.

    Args:
        columns: as of :func:`columns_of`.
        step: writes to the tensors that hold all leaves, a tensor for each column.
    """
    whole = stacks_of(columns)
    step(whole)
    for place, (targets, values) in enumerate(zip(columns, whole, strict=True)):
        if place != 1:  # the gradient is only read
            foreach_copy_(targets, list(values.unbind(0)))


def stacks_of(columns: Sequence[list[Tensor]]) -> list[Tensor]:
    """Stack each column in scratch."""
    return [_stacked(place, column) for place, column in enumerate(columns)]


def _stacked(place: int, column: Sequence[Tensor]) -> Tensor:
    """Stack a tensor of each leaf in scratch."""
    one = column[0]
    piece = scratch(("stack", place), len(column) * one.numel(), one.dtype, one.device)
    return torch.stack(list(column), out=piece.view(len(column), *one.shape))


def _is_equal(
    one_by_one: WholeLeaves, stages: Sequence[Stage], stack: Sequence[Leaf], seed: int
) -> bool | None:
    """Return True if a step from random parameters, gradients and states is the same both ways.

    No state is one that ``init`` makes: beside zeros and ones, what a product rounds is not seen.
    None if the step leaves the parameters as they are, as one of ``lr=0`` does: it shows nothing.
    """
    together, alone = _drawn(stack, seed), _drawn(stack, seed)
    start = alone[0].param.clone()
    totals = [torch.ones((), dtype=torch.float64, device="cpu") for _ in stages]
    step_stack(one_by_one, stages, together, totals)
    one_by_one.update_(stages, alone, totals)
    pairs = zip(together, alone, strict=True)
    if not all(all(map(same_bits, tensors_of(a), tensors_of(b))) for a, b in pairs):
        return False
    return None if same_bits(alone[0].param, start) else True


def _drawn(stack: Sequence[Leaf], seed: int) -> list[Leaf]:
    """Return the leaves with random numbers; parameters are small, so that steps show in them."""
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
