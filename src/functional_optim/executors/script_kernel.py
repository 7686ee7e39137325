"""The kernel of the script executor: a lane in one call, without the GIL, in no new memory."""

from collections.abc import Sequence

from torch import Tensor

from functional_optim.executors.errors import UntraceableError
from functional_optim.executors.leaf import Leaf
from functional_optim.executors.reading import kept, read
from functional_optim.executors.script_lane import (
    PIECE,
    example_totals,
    piece_elements,
    scripted_lane,
)
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

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "script"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        return True
