"""The auto kernel: for each lane, the fastest kernel that is there.

What it goes by was measured (``make bench``): torch's fused kernels (but SGD's, on long lanes) and
compiled steps take the time of memory; the former are there at once, the latter must be compiled
once. A blocked step
takes about three times as long, and is there at once for any rule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from functional_optim.executors.blocked import BlockedKernel
from functional_optim.executors.compile_request import unit_of
from functional_optim.executors.compiled import CompiledKernel
from functional_optim.executors.fused import FusedKernel
from functional_optim.executors.kernel import Kernel
from functional_optim.executors.leaf import Leaf
from functional_optim.stage import Stage, grain_of

WORTH_COMPILING = 1 << 15
"""Elements from which the compiler is started for a lane: below, calls cost more than the work."""
WORTH_CALLING = 1 << 12
"""Elements from which it is used if it is there already: below, a blocked step is no slower, but
for chains that work in blocks of elements, whose blocked steps are some hundred operations."""
LONG = 1 << 23
"""Elements from which it is started also where torch has a fused kernel, if that does not keep up
with memory: below, both wait for the caches alike."""


_RESTING = 0


@contextmanager
def without_compiling() -> Iterator[None]:
    """While this lasts, auto starts no compiler; what is compiled already is used."""
    global _RESTING  # noqa: PLW0603  one compiler, one switch
    _RESTING += 1
    try:
        yield
    finally:
        _RESTING -= 1


class Choice(NamedTuple):
    """What auto picked for a lane."""

    kernel: Kernel | None
    """The kernel; None for the reference executor."""
    name: str
    reason: str


class AutoKernel:
    """Picks a kernel for each lane, anew at each step."""

    exact = False

    def __init__(self) -> None:
        self._fused = FusedKernel()
        self._blocked = BlockedKernel()
        self._compiled = CompiledKernel(wait=False)

    def choose(self, stages: Sequence[Stage], lane: Leaf) -> Choice:
        """The kernel for a lane, and why."""
        no_fused = self._fused.refuses(stages, lane)
        if no_fused is None and self._prefers_fused(stages, lane):
            return Choice(self._fused, "fused", "torch has a fused kernel for this chain")
        if self._may_compile(stages, lane):
            no_compiled = self._compiled.refuses(stages, lane)
        else:
            count = lane.param.numel()
            no_compiled = f"{count} elements are not worth starting the compiler"
        if no_compiled is None:
            why = no_fused or "torch's fused kernel for this chain takes longer"
            return Choice(self._compiled, "compile", f"compiled; {why}")
        if no_fused is None:
            return Choice(self._fused, "fused", f"torch has a fused kernel; {no_compiled}")
        no_blocked = self._blocked.refuses(stages, lane)
        if no_blocked is None:
            return Choice(self._blocked, "blocked", f"{no_compiled}; {no_fused}")
        return Choice(None, "reference", no_blocked)

    def _prefers_fused(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        return lane.param.numel() < LONG or self._fused.keeps_up(stages, lane)

    def _may_compile(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        """Whether a compiled step is to be asked for, which may start the compiler."""
        count = lane.param.numel()
        if count >= WORTH_COMPILING and not _RESTING:
            return True
        grain = grain_of(stages)
        worth = count >= (WORTH_CALLING if grain == 1 else unit_of(grain))
        return worth and self._compiled.is_ready(stages, lane)

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        choice = self.choose(stages, lane)
        return choice.reason if choice.kernel is None else None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        first = self._prefers_fused(stages, lane)
        if first and self._fused.attempt(stages, lane, totals) is None:
            return None
        if self._may_compile(stages, lane) and self._compiled.attempt(stages, lane, totals) is None:
            return None
        if not first and self._fused.attempt(stages, lane, totals) is None:
            return None
        return self._blocked.attempt(stages, lane, totals)

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        choice = self.choose(stages, lane)
        return f"{choice.name}; {choice.reason}"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        if lane.param.numel() < WORTH_COMPILING:
            return True
        if self._prefers_fused(stages, lane) and self._fused.refuses(stages, lane) is None:
            return True
        return self._compiled.ready(stages, lane, timeout)
