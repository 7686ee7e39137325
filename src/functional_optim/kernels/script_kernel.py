"""The kernel of the script executor: a lane in one call, without the GIL, in no new memory."""

from collections.abc import Sequence

from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import Run
from functional_optim.kernels.reading import kept, read
from functional_optim.kernels.script_lane import (
    PIECE,
    example_totals,
    piece_elements,
    scripted_lane,
)


class ScriptedLaneKernel:
    """A chain whose operations, traced, are written out for TorchScript."""

    exact = True

    def is_for(self, lane: Leaf) -> bool:
        return lane.scalars is Scalars.HOST

    def supports(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        try:
            scripted_lane(tuple(stages), lane, example_totals(stages, lane.param.device))
        except UntraceableError as error:
            return str(error)
        return None

    def bind(self, stages: Sequence[Stage], lane: Leaf) -> Run | str:
        if lane.param.numel() == 0:
            return _nothing
        device = lane.param.device
        try:
            reading, numbers, tensors = read(stages, lane)
            scripted = kept(
                lane,
                "script",
                reading,
                lambda: scripted_lane(tuple(stages), lane, example_totals(stages, device)),
            )
        except UntraceableError as error:
            return str(error)
        small = lane.param.numel() <= PIECE
        piece = PIECE if small else piece_elements(scripted)
        return lambda totals: scripted.run(tensors, numbers, list(totals), piece)

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "script"


def _nothing(totals: Sequence[Tensor]) -> None:
    """The step of a lane without elements."""
