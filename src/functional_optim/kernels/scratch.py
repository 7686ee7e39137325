"""Scratch: memory of the CPU that a thread uses again in every step.

On an accelerator nothing is kept: a thread may step in several streams, and what one of them still
reads another would write to. torch's allocator there knows the streams, and costs little.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

KEPT_BYTES = 1 << 24
"""Most that is kept of one piece. Who needs more works for so long that making it anew does not
show."""

VIEWS = 512
"""Of how many owners views are kept."""


_Views = TypeVar("_Views")


class _Scratch(threading.local):
    """The pieces of one thread, by name."""

    def __init__(self) -> None:
        self.pieces: dict[Any, Tensor] = {}
        self.views: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """Of pieces that are all there, for as long as their owner is."""
        self.lent = 0
        """How many pieces were given that are not kept."""


_SCRATCH = _Scratch()


def scratch(name: Any, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of so many elements, whatever they are; on the CPU, in the same memory for a name.

    Args:
        name: says who asks, and for which of its pieces: what lies there is wanted until it asks
            again.
        count: elements.
        dtype: of the tensor.
        device: where it lies.
    """
    key = name, dtype, device
    found = _SCRATCH.pieces.get(key)
    if found is None or found.numel() < count:
        # An inference tensor could not be written to outside of that mode.
        with torch.inference_mode(mode=False):
            found = torch.empty(count, dtype=dtype, device=device)
        if device.type == "cpu" and count * dtype.itemsize <= KEPT_BYTES:
            _SCRATCH.pieces[key] = found
            _SCRATCH.views.clear()  # they would keep the memory that was there before
        else:
            _SCRATCH.lent += 1
    return found[:count]


def views_of_scratch(owner: Any, make: Callable[[], _Views]) -> _Views:
    """Views of pieces, made once for the same owner, as long as it and the pieces are there.

    Args:
        owner: is looked up, and not kept; what is made must not keep it, either.
        make: makes them, of what :func:`scratch` gives.
    """
    found: _Views | None = _SCRATCH.views.get(owner)
    if found is None:
        lent = _SCRATCH.lent
        found = make()
        if _SCRATCH.lent == lent:
            if len(_SCRATCH.views) >= VIEWS:
                _SCRATCH.views.clear()
            _SCRATCH.views[owner] = found
    return found
