"""The auto kernel: for each lane, the fastest kernel there is; on the CPU, always the same bits.

On the CPU a chain is stepped by its exact loop, and where there is none (an operation without a
formula, no compiler, or a step so short that compiling is not worth while) by torch's operations
over blocks. Both are the reference bit for bit, so that it shows in no result which of them it was:
not which rank has a compiler, nor when it got done. On other devices torch's fused kernels come
first, then compiled programs, as each chain allows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.fused import FusedKernel
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.kernel import Feed, Kernel, Run

WORTH_COMPILING = 1 << 12
"""Elements from which a loop is compiled for a step, or for all steps of the same leaves so far."""


_Named = tuple[str, Kernel]
"""A kernel, and what it is called where it was picked."""


class Choice(NamedTuple):
    """What auto picked for a lane."""

    kernel: Kernel | None
    """The kernel; None for the reference executor."""
    name: str
    reason: str


def _number(step: float | Tensor) -> float:
    """Which step it is, from 1, as far as it is known."""
    return 1.0 if isinstance(step, Tensor) else max(1.0, step)


class AutoKernel:
    """Picks a kernel for each lane.

    Args:
        exact: the loops for the CPU.
        fused: torch's own, for other devices.
        inductor: compiled programs, for other devices.
        blocked: torch's operations over blocks, where there is nothing else.
    """

    exact = True
    takes_device_scalars = True

    def __init__(
        self,
        exact: ExactKernel | None = None,
        fused: Kernel | None = None,
        inductor: Kernel | None = None,
        blocked: Kernel | None = None,
    ) -> None:
        self._exact = ExactKernel() if exact is None else exact
        self._loops: _Named = ("exact", self._exact)
        self._fused: _Named = ("fused", FusedKernel() if fused is None else fused)
        self._inductor: _Named = ("compile", InductorKernel() if inductor is None else inductor)
        self._blocked: _Named = ("blocked", BlockedKernel() if blocked is None else blocked)

    def choose(self, stages: Sequence[Stage], lane: Leaf) -> Choice:
        """The kernel for a lane, and why."""
        kernels = self._kernels(stages, lane)
        few = lane.param.is_cpu and kernels == [self._blocked]
        reasons = ["no loop is compiled for so few elements"] if few else []
        for name, kernel in kernels:
            refusal = kernel.supports(stages, lane)
            if refusal is None:
                return Choice(kernel, name, "; ".join(reasons))
            reasons.append(refusal)
        return Choice(None, "reference", reasons[-1])

    def _kernels(self, stages: Sequence[Stage], lane: Leaf) -> list[_Named]:
        """The kernels that may step a lane, the best first."""
        if lane.scalars is Scalars.DEVICE:
            return [self._inductor]
        if not lane.param.is_cpu:
            return [self._fused, self._inductor, self._blocked]
        if self._is_compiled(stages, lane, lane.param.numel()):
            return [self._loops, self._blocked]
        return [self._blocked]

    def _is_compiled(self, stages: Sequence[Stage], like: Leaf, count: int) -> bool:
        """Whether a loop is compiled for so many elements like these, or is there already."""
        worth = count * _number(like.step) >= WORTH_COMPILING
        return worth or self._exact.is_there(stages, like)

    def supports(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        choice = self.choose(stages, lane)
        return choice.reason if choice.kernel is None else None

    def bind(self, stages: Sequence[Stage], lane: Leaf) -> Run | str:
        bound: Run | str = "no kernel is for it"
        for _, kernel in self._kernels(stages, lane):
            bound = kernel.bind(stages, lane)
            if not isinstance(bound, str):
                return bound
        return bound

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> Feed | None:
        if not like.param.is_cpu or like.scalars is Scalars.DEVICE:
            return None
        if not self._is_compiled(stages, like, elements):
            return None
        return self._exact.bind_table(stages, like, elements)

    def is_cut_freely(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        return self._exact.is_cut_freely(stages, lane)

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        choice = self.choose(stages, lane)
        said = choice.name if choice.kernel is None else choice.kernel.explain(stages, lane)
        return "; ".join(filter(None, [said, choice.reason]))

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        return all(kernel.ready(stages, lane, timeout) for _, kernel in self._kernels(stages, lane))
