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

from functional_optim.executors.blocked import BlockedKernel
from functional_optim.executors.exact import ExactKernel
from functional_optim.executors.fused import FusedKernel
from functional_optim.executors.inductor import InductorKernel
from functional_optim.executors.kernel import Feed, Kernel
from functional_optim.executors.leaf import Leaf
from functional_optim.stage import Stage

WORTH_COMPILING = 1 << 12
"""Elements from which a loop is compiled for a step, or for all steps of the same leaves so far."""


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
    """Picks a kernel for each lane."""

    exact = True

    def __init__(self) -> None:
        self._exact = ExactKernel()
        self._fused = FusedKernel()
        self._blocked = BlockedKernel()
        self._inductor = InductorKernel()

    def choose(self, stages: Sequence[Stage], lane: Leaf) -> Choice:
        """The kernel for a lane, and why."""
        kernels = self._kernels(stages, lane, lane.param.numel())
        few = lane.param.is_cpu and kernels[0][1] is not self._exact
        reasons = ["no loop is compiled for so few elements"] if few else []
        for name, kernel in kernels:
            refusal = kernel.refuses(stages, lane)
            if refusal is None:
                return Choice(kernel, name, "; ".join(reasons))
            reasons.append(refusal)
        return Choice(None, "reference", reasons[-1])

    def _kernels(self, stages: Sequence[Stage], lane: Leaf, count: int) -> list[tuple[str, Kernel]]:
        """The kernels that may step so many elements like these, the best first."""
        if not lane.param.is_cpu:
            return [
                ("fused", self._fused),
                ("compile", self._inductor),
                ("blocked", self._blocked),
            ]
        blocked: tuple[str, Kernel] = ("blocked", self._blocked)
        worth = count * _number(lane.step) >= WORTH_COMPILING
        if not worth and not self._exact.is_there(stages, lane):
            return [blocked]
        return [("exact", self._exact), blocked]

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        choice = self.choose(stages, lane)
        return choice.reason if choice.kernel is None else None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        refusal = None
        for _, kernel in self._kernels(stages, lane, lane.param.numel()):
            refusal = kernel.attempt(stages, lane, totals)
            if refusal is None:
                return None
        return refusal

    def bind(self, stages: Sequence[Stage], like: Leaf, elements: int) -> Feed | None:
        if self._kernels(stages, like, elements)[0][1] is not self._exact:
            return None
        return self._exact.bind(stages, like, elements)

    def is_cut_freely(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        return self._exact.is_cut_freely(stages, lane)

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        choice = self.choose(stages, lane)
        said = choice.name if choice.kernel is None else choice.kernel.explain(stages, lane)
        return "; ".join(filter(None, [said, choice.reason]))

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        return all(
            kernel.ready(stages, lane, timeout)
            for _, kernel in self._kernels(stages, lane, lane.param.numel())
        )
