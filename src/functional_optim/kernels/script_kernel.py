"""The kernel of the script executor: a chunk in one call, without the GIL, in no new memory."""

from collections.abc import Sequence

from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.cache_key import entry, key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import Run
from functional_optim.kernels.script_chunk import (
    PIECE,
    example_totals,
    piece_elements,
    scripted_chunk,
)


class ScriptedChunkKernel:
    """A chain whose operations, traced, are written out for TorchScript."""

    exact = True

    def is_for(self, chunk: Leaf) -> bool:
        return chunk.scalars is Scalars.HOST

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        try:
            scripted_chunk(tuple(stages), chunk, example_totals(stages, chunk.param.device))
        except UntraceableError as error:
            return str(error)
        return None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> Run | str:
        if chunk.param.numel() == 0:
            return _nothing
        device = chunk.param.device
        try:
            key, numbers, tensors = key_of(stages, chunk)
            scripted = entry(
                chunk,
                "script",
                key,
                lambda: scripted_chunk(tuple(stages), chunk, example_totals(stages, device)),
            )
        except UntraceableError as error:
            return str(error)
        small = chunk.param.numel() <= PIECE
        piece = PIECE if small else piece_elements(scripted)
        return lambda totals: scripted.run(tensors, numbers, list(totals), piece)

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return "script"


def _nothing(totals: Sequence[Tensor]) -> None:
    """The step of a chunk without elements."""
