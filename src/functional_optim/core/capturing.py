"""Check if a CUDA graph is being captured, which only some steps can be a part of."""

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor

_IS_CUDA = attrgetter("is_cuda")


def is_capturing(params: Iterable[Tensor]) -> bool:
    """Return True if a step of these parameters becomes a part of a CUDA graph."""
    if torch.compiler.is_compiling():
        return False  # what is traced is not run yet, and counts its steps itself
    return any(map(_IS_CUDA, params)) and torch.cuda.is_current_stream_capturing()


def check_not_captured(params: Iterable[Tensor]) -> None:
    """No step whose numbers are Python's may become a part of a CUDA graph.

    Raises:
        RuntimeError: one is being captured.
    """
    if is_capturing(params):
        raise RuntimeError(
            "a CUDA graph is being captured. Its replays would repeat the coefficients of this one "
            "step, and count none, since both are Python's work: capture a step of "
            "optimizer.bind(params, capturable=True), or step outside of the graph"
        )
