"""Many short gradients, brought into the cache and stepped from there, piece by piece.

To copy all of them into the flat gradient, and to read that in the step, moves each through memory
three times. A piece that is stepped as soon as it is copied is read from memory once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.flat_buffer import FlatBuffer
from functional_optim.native import LOOPS
from functional_optim.native.loader import Loops
from functional_optim.stretches import Stretch

PIECE_BYTES = 1 << 22
"""Of a piece: it stays in the cache. Four threads share one, more have a longer one."""

LEAST_PIECES = 4
"""So many of them are worth it: less is in the cache anyway when the step reads it."""


class PassingGradients:
    """Brings gradients to a step.

    Args:
        buffers: of the layout, those that are stepped as lanes.
        views: for each parameter of the layout, a gradient as its buffer would hold it.
        written: what a step writes to: gradients that lie there are all copied before.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        views: Sequence[Tensor | None],
        written: Sequence[Tensor],
    ) -> None:
        self._buffers = buffers
        self._views = views
        self._written = list(written)
        self._read: frozenset[int] | None = None
        self._members: list[int] = []
        self._numbers: dict[int, int] = {}
        self._bytes = 0
        self._places: Any = None
        self._taken: Any = None
        self._scratch: dict[torch.dtype, Tensor] = {}

    def find(self, given: Sequence[Any], read: frozenset[int]) -> "Passing | None":
        """How gradients are brought; None where they are to be copied into the flat buffers.

        Args:
            given: a gradient for each parameter that the layout was given.
            read: the places of those that are read where they lie.
        """
        if read != self._read:
            self._look_at(read)
        worth = self._bytes >= LEAST_PIECES * piece_bytes()
        loops = LOOPS.get(len(self._members)) if worth else None
        if loops is None:
            return None
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            if self._places is None:
                views = [self._views[i] for i in self._members]
                self._places = loops.remember(views)
                self._taken = loops.remember(self._written)
            # A list of our own: nobody can take a gradient away while it is copied without the GIL.
            mine = list(map(given.__getitem__, self._members))
            if self._places is None or self._taken is None:
                return None
            if not loops.fits(self._places, mine, self._taken):
                return None
        return Passing(self, loops, self._places, mine)

    def number(self, index: int) -> int:
        """The number of a parameter's gradient among those that are brought."""
        return self._numbers[index]

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Where a piece is brought to."""
        found = self._scratch.get(dtype)
        size = piece_bytes() // dtype.itemsize
        if found is None or found.numel() < size:
            # An inference tensor could not be written to outside of that mode.
            with torch.inference_mode(mode=False):
                found = self._scratch[dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return found

    def _look_at(self, read: frozenset[int]) -> None:
        """What there is to be brought, where these are not."""
        segments = [one for buffer in self._buffers for one in buffer.segments]
        self._read = read
        self._members = [one.index for one in segments if one.index not in read]
        self._numbers = {index: number for number, index in enumerate(self._members)}
        count = sum(
            one.numel * buffer.dtype.itemsize
            for buffer in self._buffers
            for one in buffer.segments
            if one.index not in read
        )
        on_cpu = all(buffer.device.type == "cpu" for buffer in self._buffers)
        self._bytes = count if on_cpu else 0
        self._places = self._taken = None


class Passing:
    """The gradients of one step, which fit, and lie where nothing of the step is written.

    Args:
        source: what they are brought for.
        loops: what copies them.
        places: what the loops remember of where they belong.
        mine: all of them, in order.
    """

    def __init__(
        self, source: PassingGradients, loops: Loops, places: Any, mine: list[Any]
    ) -> None:
        self._source = source
        self._loops = loops
        self._places = places
        self._mine = mine

    def stretch(self, buffer: FlatBuffer, first: int, last: int) -> Stretch:
        """Neighbouring segments, both included, whose gradients are brought before a step."""
        scratch = self._source.scratch(buffer.dtype)
        return Stretch(first, scratch, partial(self._bring, buffer, first, last, scratch))

    def _bring(self, buffer: FlatBuffer, first: int, last: int, scratch: Tensor) -> None:
        start, stop = (self._source.number(buffer.segments[k].index) for k in (first, last))
        threads = torch.get_num_threads()
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            if self._loops.bring(self._places, self._mine, start, stop + 1, scratch, threads):
                return
        raise RuntimeError(
            f"gradients from {buffer.segments[first].name!r} on have changed while a step was "
            "made, so that it was made of some parameters only: another thread must not resize or "
            "re-point gradients meanwhile"
        )


def piece_bytes() -> int:
    """How long a piece is."""
    return PIECE_BYTES * max(1, torch.get_num_threads() // 4)
