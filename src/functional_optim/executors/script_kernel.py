"""The kernel of the script executor: a lane in one call, without the GIL, in no new memory."""

from collections.abc import Sequence

from torch import Tensor

from functional_optim.executors.errors import UntraceableError
from functional_optim.executors.leaf import Leaf
from functional_optim.executors.prepared import Prepared, is_short, prepared
from functional_optim.executors.reading import kept, read
from functional_optim.executors.script_lane import (
    PIECE,
    example_totals,
    piece_elements,
    scripted_lane,
    short_step,
)
from functional_optim.executors.trace import trace
from functional_optim.stage import Stage


class ScriptedLaneKernel:
    """A chain whose operations, traced, are written out for TorchScript."""

    exact = True

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        try:
            scripted_lane(tuple(stages), lane, example_totals(stages, lane.param.device))
        except UntraceableError as error:
            return str(error)
        return None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        if lane.param.numel() == 0:
            return None
        try:
            reading, numbers, tensors = read(stages, lane)
            scripted = kept(
                lane, "script", reading, lambda: scripted_lane(tuple(stages), lane, totals)
            )
        except UntraceableError as error:
            return str(error)
        small = lane.param.numel() <= PIECE
        piece = PIECE if small else piece_elements(scripted)
        scripted.run(tensors, numbers, list(totals), piece)
        return None

    def prepare(self, stages: Sequence[Stage], lane: Leaf) -> Prepared | None:
        if not is_short(lane):
            return None
        try:
            reading, _, tensors = read(stages, lane)
            scripted = scripted_lane(tuple(stages), lane, ())
            step = short_step(scripted)
        except UntraceableError:
            return None
        # Numbers are computed in Python, to the same bits: a call that takes lists takes longer.
        prologue = trace(tuple(stages), reading.classes, reading.shape).prologue
        return prepared(lane, reading, tensors, prologue, step, scripted.scratch)

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "script"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        return True
