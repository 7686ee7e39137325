"""The auto kernel: for each lane, the fastest kernel that is there.

What it goes by was measured (``make bench``): torch's fused kernels and compiled steps take the
time of memory; the former are there at once, the latter must be compiled once. A blocked step takes
up to three times as long, and is there at once for any rule. Of few elements, calls are what takes
time.
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
from functional_optim.executors.prepared import Prepared
from functional_optim.stage import Stage, grain_of

WORTH_COMPILING = 1 << 15
"""Elements from which the compiler is started for a lane: below, calls cost more than the work."""
WORTH_CALLING = 1 << 12
"""Elements from which it is used if it is there already: below, a blocked step is no slower, but
for chains that work in blocks of elements, whose blocked steps are some hundred operations."""
FEW = 2
"""Operations up to which a blocked step of a lane that is not worth calling anything for is faster
than torch's fused kernel, which takes lists."""


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


def _is_worth_calling(stages: Sequence[Stage], lane: Leaf) -> bool:
    """Whether a compiled step is used for a lane if it is there."""
    grain = grain_of(stages)
    return lane.param.numel() >= (WORTH_CALLING if grain == 1 else unit_of(grain))


class AutoKernel:
    """Picks a kernel for each lane, anew at each step."""

    exact = False

    def __init__(self) -> None:
        self._fused = FusedKernel()
        self._blocked = BlockedKernel()
        self._compiled = CompiledKernel(wait=False)

    def choose(self, stages: Sequence[Stage], lane: Leaf) -> Choice:
        """The kernel for a lane, and why."""
        if self._is_one_call(stages, lane):
            return Choice(self._blocked, "blocked", "one call or two on few elements")
        no_fused = self._fused.refuses(stages, lane)
        if no_fused is None:
            return Choice(self._fused, "fused", "torch has a fused kernel for this chain")
        if self._may_compile(stages, lane):
            no_compiled = self._compiled.refuses(stages, lane)
        else:
            count = lane.param.numel()
            no_compiled = f"{count} elements are not worth starting the compiler"
        if no_compiled is None:
            return Choice(self._compiled, "compile", f"compiled; {no_fused}")
        no_blocked = self._blocked.refuses(stages, lane)
        if no_blocked is None:
            return Choice(self._blocked, "blocked", f"{no_compiled}; {no_fused}")
        return Choice(None, "reference", no_blocked)

    def _is_one_call(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        """Whether a blocked step is next to nothing, so that nothing else is asked."""
        if not lane.param.is_cpu or lane.param.numel() >= WORTH_CALLING:
            return False
        found: bool | None = None if lane.memo is None else lane.memo.get("one call")
        if found is None:
            operations = self._blocked.operations(stages, lane)
            found = operations is not None and operations <= FEW
            if lane.memo is not None:
                lane.memo["one call"] = found
        return found

    def _may_compile(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        """Whether a compiled step is to be asked for, which may start the compiler."""
        if lane.param.numel() >= WORTH_COMPILING and not _RESTING:
            return True
        return _is_worth_calling(stages, lane) and self._compiled.is_ready(stages, lane)

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        choice = self.choose(stages, lane)
        return choice.reason if choice.kernel is None else None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        if not self._is_one_call(stages, lane):
            if self._fused.attempt(stages, lane, totals) is None:
                return None
            if (
                self._may_compile(stages, lane)
                and self._compiled.attempt(stages, lane, totals) is None
            ):
                return None
        return self._blocked.attempt(stages, lane, totals)

    def prepare(self, stages: Sequence[Stage], lane: Leaf) -> Prepared | None:
        if not self._is_one_call(stages, lane):
            fused = self._fused.prepare(stages, lane)
            if fused is not None or self._fused.refuses(stages, lane) is None:
                return fused
            if _is_worth_calling(stages, lane):
                return None  # it may be compiled one day
        return self._blocked.prepare(stages, lane)

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        choice = self.choose(stages, lane)
        return f"{choice.name}; {choice.reason}"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        if lane.param.numel() < WORTH_COMPILING:
            return True
        if self._fused.refuses(stages, lane) is None:
            return True
        return self._compiled.ready(stages, lane, timeout)
