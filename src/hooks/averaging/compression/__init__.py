"""Compression: one flat vector as few bytes, and back, as pure functions."""

from hooks.averaging.compression.bfloat16 import BFloat16
from hooks.averaging.compression.blocks import Blocks
from hooks.averaging.compression.error_feedback import with_error_feedback
from hooks.averaging.compression.exact import Exact
from hooks.averaging.compression.protocol import Compression
from hooks.averaging.compression.statistical import Statistical
from hooks.averaging.compression.top_k import TopK

__all__ = [
    "BFloat16",
    "Blocks",
    "Compression",
    "Exact",
    "Statistical",
    "TopK",
    "with_error_feedback",
]
