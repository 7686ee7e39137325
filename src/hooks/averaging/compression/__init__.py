"""Compression of one flat vector to few bytes and back, as pure functions."""

from typing import NoReturn

from hooks.averaging.compression.bfloat16 import BFloat16
from hooks.averaging.compression.blocks import Blocks
from hooks.averaging.compression.error_feedback import with_error_feedback
from hooks.averaging.compression.protocol import Compression
from hooks.averaging.compression.top_k import TopK

__all__ = ["BFloat16", "Blocks", "Compression", "TopK", "with_error_feedback"]

_GONE = {
    "Exact": "without a compression, changes are sent as they are: compression=None",
    "Statistical": "import it from hooks.averaging.contrib",
}


def __getattr__(name: str) -> NoReturn:
    if name in _GONE:
        raise ImportError(f"hooks.averaging.compression has no {name} any more: {_GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
