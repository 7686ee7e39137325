"""Programs that step one whole leaf each, and write to scratch and to the leaf.

The reference allocates each temporary, and copies its results into the leaf. A program runs the
same operations, so it has the same bits. Its operations write to scratch, which later steps reuse,
and to the parameter and its state. The reference steps leaves without a program: leaves whose rules
read data, and leaves whose tensors are not plain or share memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor
from functional_optim.core.leaf import PLAIN, Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import are_disjoint, tensors_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.program import Program, TensorLayout, whole_program
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.scratch import scratch, views_of_scratch
from functional_optim.kernels.shaped_trace import shaped_trace
from functional_optim.kernels.signature import Numbers, signature

CPU = torch.device("cpu")
_REFERENCE = ReferenceExecutor()


@dataclass(frozen=True, eq=False)
class LeafProgram:
    """Program for leaves of one layout, with the function that computes its scalar arguments."""

    program: Program
    compute_scalars: Callable[[Numbers, Sequence[Tensor]], tuple[Any, ...]]
    device: torch.device

    def arguments(self, numbers: Numbers, totals: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments of :attr:`step` after the tensors of a leaf, for this thread."""
        scalars = self.compute_scalars(numbers, totals)
        if self.device.type != "cpu":
            return scalars
        return (*scalars, *views_of_scratch(self, self._scratch))

    def _scratch(self) -> list[Tensor]:
        return [_scratch_of(i, one) for i, one in enumerate(self.program.scratch)]

    @property
    def step(self) -> Callable[..., object]:
        """The function that steps a leaf. It takes the tensors of the leaf, then the arguments."""
        return self.program.step if self.device.type == "cpu" else self._step_on_device

    def _step_on_device(self, *given: Any) -> None:
        """Step a leaf with temporaries that are freed at the end of the call."""
        temporaries = [
            torch.empty_strided(one.size, one.stride, dtype=one.dtype, device=self.device)
            for one in self.program.scratch
        ]
        self.program.step(*given, *temporaries)


_Programs = Cache["LeafProgram | str"]
"""Programs by device and layouts of the tensors; the reason if a program cannot be used."""

_PROGRAMS: Cache[_Programs] = Cache()
"""Programs by stages and signature."""


def step_leaf(stages: Sequence[Stage], leaf: Leaf, totals: Sequence[Tensor]) -> None:
    """Step a whole leaf in place, by its program or by the reference, with the same bits."""
    found, numbers = _programs_for(stages, leaf)
    tensors = tensors_of(leaf)
    known = _find_program(found, stages, leaf, tensors)
    if isinstance(known, str):
        _REFERENCE.update_(stages, [leaf], totals)
    else:
        known.step(*tensors, *known.arguments(numbers, totals))


def program_of(stages: Sequence[Stage], leaf: Leaf) -> LeafProgram | str:
    """Return the program that steps a whole leaf, or the reason why there is none."""
    return _find_program(_programs_for(stages, leaf)[0], stages, leaf, tensors_of(leaf))


def _find_program(
    found: _Programs | None, stages: Sequence[Stage], leaf: Leaf, tensors: Sequence[Tensor]
) -> LeafProgram | str:
    if found is None or not _are_plain(tensors):
        return "its numbers or its tensors are no plain ones"
    layouts = tuple([(one.shape, one.dtype) for one in tensors])
    device = tensors[0].device
    return found.get_or_make((device, layouts), lambda: _build_program(stages, leaf, device))


def _programs_for(stages: Sequence[Stage], leaf: Leaf) -> tuple[_Programs | None, Numbers]:
    """Return the programs for leaves with these coefficients, and the float coefficients."""
    if leaf.scalars is Scalars.DEVICE:
        return None, []
    try:
        shape, numbers, _ = signature(stages, leaf)
    except UntraceableError:
        return None, []
    return _PROGRAMS.get_or_make((tuple(stages), shape), Cache), numbers


def _build_program(stages: Sequence[Stage], leaf: Leaf, device: torch.device) -> LeafProgram | str:
    try:
        shape, numbers, _ = signature(stages, leaf)
        trace, validated = shaped_trace(stages, leaf, shape, numbers)
        return LeafProgram(whole_program(trace, validated), trace.compute_scalars, device)
    except UntraceableError as error:
        return str(error)


def _scratch_of(index: int, layout: TensorLayout) -> Tensor:
    last = sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
    count = 1 + last if 0 not in layout.size else 0
    piece = scratch(("whole", index), count, layout.dtype, CPU)
    return piece.as_strided(layout.size, layout.stride)


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return True if all are contiguous, on one CPU or CUDA device, and share no memory."""
    device = tensors[0].device
    if device.type not in ("cpu", "cuda"):
        return False
    for one in tensors:
        if type(one) not in PLAIN or one.device != device or one.is_conj() or one.is_neg():
            return False
        if is_functorch_wrapped_tensor(one) or not one.is_contiguous():
            return False
    return are_disjoint(tensors)
