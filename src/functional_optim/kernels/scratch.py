"""Scratch: CPU memory for temporaries that a thread reuses in every step.

On an accelerator no memory is kept. A thread may step in several streams, and one stream would
write to memory that another still reads. torch's allocator knows the streams, and is fast there.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

KEPT_BYTES = 1 << 24
"""Largest piece that is kept, in bytes. With larger pieces, the time of an allocation is small
compared with the step."""

VIEWS = 512
"""Largest number of owners whose views are kept."""


_Views = TypeVar("_Views")


class _Scratch(threading.local):
    """Pieces of scratch of one thread, by name."""

    def __init__(self) -> None:
        self.pieces: dict[Any, Tensor] = {}
        self.views: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """Views of kept pieces, by owner. They are freed together with the owner."""
        self.unkept = 0
        """Number of pieces that were returned, but not kept."""


_SCRATCH = _Scratch()


def scratch(name: Any, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized 1-D tensor; on the CPU, with the same memory for the same name.

    The content is valid until the next call with this name.
    """
    key = name, dtype, device
    found = _SCRATCH.pieces.get(key)
    if found is None or found.numel() < count:
        # An inference tensor could not be written outside of inference mode.
        with torch.inference_mode(mode=False):
            found = torch.empty(count, dtype=dtype, device=device)
        if device.type == "cpu" and count * dtype.itemsize <= KEPT_BYTES:
            _SCRATCH.pieces[key] = found
            _SCRATCH.views.clear()  # they would keep the old memory alive
        else:
            _SCRATCH.unkept += 1
    return found[:count]


def views_of_scratch(owner: Any, make: Callable[[], _Views]) -> _Views:
    """Return views of scratch, which are made once for an owner as long as the pieces are kept.

    The owner is kept by a weak reference; the views must not refer to it.
    """
    found: _Views | None = _SCRATCH.views.get(owner)
    if found is None:
        unkept = _SCRATCH.unkept
        found = make()
        if _SCRATCH.unkept == unkept:
            if len(_SCRATCH.views) >= VIEWS:
                _SCRATCH.views.clear()
            _SCRATCH.views[owner] = found
    return found
