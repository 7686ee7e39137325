"""Many short gradients, brought into the cache and stepped from there, piece by piece.

To copy all of them into the flat gradient, and to read that in the step, moves each through memory
three times. A piece that is stepped as soon as it is copied is read from memory once.
"""

import threading
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

_SCRATCH = threading.local()


class Bringer:
    """Brings gradients to steps.

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
        self._without: frozenset[int] | None = None
        self._members: list[int] = []
        self._numbers: dict[int, int] = {}
        self._bytes = 0
        self._places: Any = None
        self._closed: Any = None

    def find(self, given: Sequence[Any], without: frozenset[int]) -> "Brought | None":
        """The gradients to be brought; None where they are to be copied into the flat buffers.

        Args:
            given: a gradient or None for each parameter that the layout was given.
            without: the places of those that are read where they lie, or are None.
        """
        if self.count(without) == 0:
            return None
        loops = LOOPS.get(len(self._members))
        if loops is None:
            return None
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            if self._places is None:
                views = [self._views[i] for i in self._members]
                self._places = loops.remember(views)
                self._closed = loops.remember(self._written)
            # A list of our own: nobody can take a gradient away while it is copied without the GIL.
            mine = list(map(given.__getitem__, self._members))
            if self._places is None or self._closed is None:
                return None
            if not loops.fits(self._places, mine, self._closed):
                return None
        return Brought(loops, self._places, mine, self._numbers)

    def count(self, without: frozenset[int]) -> int:
        """How many gradients are worth bringing, where these are not brought: all others, or 0."""
        if without != self._without:
            self._look_at(without)
        return len(self._members) if self._bytes >= LEAST_PIECES * piece_bytes() else 0

    def _look_at(self, without: frozenset[int]) -> None:
        """What there is to be brought, where these are not."""
        mine = [
            (one, buffer)
            for buffer in self._buffers
            for one in buffer.segments
            if one.index not in without
        ]
        self._without = without
        self._members = [one.index for one, _ in mine]
        self._numbers = {index: number for number, index in enumerate(self._members)}
        on_cpu = all(buffer.device.type == "cpu" for buffer in self._buffers)
        self._bytes = on_cpu * sum(one.numel * buffer.dtype.itemsize for one, buffer in mine)
        self._places = self._closed = None


class Brought:
    """The gradients of one step, which fit, and lie where nothing of the step is written.

    Args:
        loops: what copies them.
        places: what the loops remember of where they belong.
        mine: all of them, in order.
        numbers: which of them belongs to a parameter.
    """

    def __init__(self, loops: Loops, places: Any, mine: list[Any], numbers: dict[int, int]) -> None:
        self._loops = loops
        self._places = places
        self._mine = mine
        self._numbers = numbers
        self.piece = piece_bytes()
        """The bytes of a piece."""

    def stretch(self, buffer: FlatBuffer, first: int, last: int) -> Stretch:
        """Neighbouring segments, both included, whose gradients are brought before a step.

        They are one piece; the first has elements, or is alone.
        """
        scratch = _scratch(self.piece, buffer.dtype)
        return Stretch(first, scratch, partial(self._bring, buffer, first, last, scratch))

    def _bring(self, buffer: FlatBuffer, first: int, last: int, scratch: Tensor) -> None:
        start, stop = (self._numbers[buffer.segments[k].index] for k in (first, last))
        threads = torch.get_num_threads()
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            if self._loops.bring(self._places, self._mine, start, stop + 1, scratch, threads):
                return
        raise RuntimeError(
            f"gradients from {buffer.segments[first].name!r} on have changed while a step was "
            "made: the parameters before it were stepped, and no step was counted. Another thread "
            "must not resize or re-point gradients meanwhile; load a state from before"
        )


def piece_bytes() -> int:
    """How long a piece is."""
    return PIECE_BYTES * max(1, torch.get_num_threads() // 4)


def _scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Where pieces are brought to: used again and again, by each thread for itself."""
    found: Tensor | None = getattr(_SCRATCH, "piece", None)
    if found is None or found.numel() < size:
        # An inference tensor could not be written to outside of that mode.
        with torch.inference_mode(mode=False):
            found = _SCRATCH.piece = torch.empty(size, dtype=torch.uint8, device="cpu")
    return found[:size].view(dtype)
