"""Whole leaves stepped one by one, by programs that write into scratch.

The reference makes each temporary anew, and copies its results to where they belong. A program is
the same operations, so the same bits, written into memory that is kept from step to step, and into
the parameter and its state themselves. A leaf of which there is no program goes the reference's
way: one whose rules look at data, or whose tensors are no plain ones, or share memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.leaf import PLAIN, Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import are_disjoint, tensors_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.program import Program, Whole, whole_program
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.scratch import scratch, views_of_scratch
from functional_optim.kernels.shaped_trace import shaped_trace
from functional_optim.kernels.signature import Numbers, signature

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Known:
    """A program, and what gives it its scalar arguments."""

    program: Program
    compute_scalars: Callable[[Numbers, Sequence[Tensor]], tuple[Any, ...]]
    device: torch.device

    def memory(self) -> list[Tensor]:
        """Return scratch of this thread for the temporaries of the program."""
        return [_laid(i, one) for i, one in enumerate(self.program.scratch)]

    def arguments(self, numbers: Numbers, totals: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return what :attr:`step` is given beside the tensors of a leaf, in this thread."""
        scalars = self.compute_scalars(numbers, totals)
        if self.device.type != "cpu":
            return scalars
        return (*scalars, *views_of_scratch(self, self.memory))

    @property
    def step(self) -> Callable[..., object]:
        """The function that steps a leaf. It is given its tensors, then :meth:`arguments`."""
        return self.program.step if self.device.type == "cpu" else self._step_anew

    def _step_anew(self, *given: Any) -> None:
        """Step a leaf with temporaries of this call. They are freed at its end."""
        made = [
            torch.empty_strided(one.size, one.stride, dtype=one.dtype, device=self.device)
            for one in self.program.scratch
        ]
        self.program.step(*given, *made)


_Programs = Cache["Known | str"]
"""Programs by the layouts of tensors; of which there is none, why."""

_PROGRAMS: Cache[_Programs] = Cache()
"""The same by stages and choices."""


class WholeLeaves:
    """Steps leaves one by one, each as a whole; bit for bit as the reference does."""

    def __init__(self) -> None:
        self._reference = ReferenceExecutor()

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], totals: Sequence[Tensor]
    ) -> None:
        """The step, written into the params and states of the leaves.

        Args:
            stages: of the chain.
            leaves: with gradients.
            totals: the sum of each measured stage.
        """
        found: _Programs | None = None
        numbers: Numbers = []
        seen: Any = self  # no coefficients are this
        for leaf in leaves:
            if leaf.coefficients is not seen:
                seen = leaf.coefficients
                found, numbers = _programs_for(stages, leaf)
            tensors = tensors_of(leaf)
            known = _known(found, stages, leaf, tensors)
            if isinstance(known, str):
                self._reference.update_(stages, [leaf], totals)
            else:
                known.step(*tensors, *known.arguments(numbers, totals))


def program_of(stages: Sequence[Stage], leaf: Leaf) -> Known | str:
    """Return the program that steps a leaf as a whole; or the reason why there is none."""
    return _known(_programs_for(stages, leaf)[0], stages, leaf, tensors_of(leaf))


def _known(
    found: _Programs | None, stages: Sequence[Stage], leaf: Leaf, tensors: Sequence[Tensor]
) -> Known | str:
    if found is None or not _are_plain(tensors):
        return "its numbers or its tensors are no plain ones"
    layouts = tuple([(one.shape, one.dtype) for one in tensors])
    device = tensors[0].device
    return found.get_or_make((device, layouts), lambda: _written(stages, leaf, device))


def _programs_for(stages: Sequence[Stage], leaf: Leaf) -> tuple[_Programs | None, Numbers]:
    """The programs for leaves with these coefficients, and the numbers among those."""
    if leaf.scalars is Scalars.DEVICE:
        return None, []
    try:
        shape, numbers, _ = signature(stages, leaf)
    except UntraceableError:
        return None, []
    return _PROGRAMS.get_or_make((tuple(stages), shape), Cache), numbers


def _written(stages: Sequence[Stage], leaf: Leaf, device: torch.device) -> Known | str:
    try:
        shape, numbers, _ = signature(stages, leaf)
        trace, validated = shaped_trace(stages, leaf, shape, numbers)
        return Known(whole_program(trace, validated), trace.compute_scalars, device)
    except UntraceableError as error:
        return str(error)


def _laid(place: int, layout: Whole) -> Tensor:
    """Scratch of a layout."""
    reach = sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
    count = 1 + reach if 0 not in layout.size else 0
    piece = scratch(("whole", place), count, layout.dtype, CPU)
    return piece.as_strided(layout.size, layout.stride)


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return True if all are contiguous, on one CPU or CUDA device, and none is part of another."""
    device = tensors[0].device
    if device.type not in ("cpu", "cuda"):
        return False
    for one in tensors:
        if type(one) not in PLAIN or one.device != device or one.is_conj() or one.is_neg():
            return False
        if is_functorch_wrapped_tensor(one) or not one.is_contiguous():
            return False
    return are_disjoint(tensors)
