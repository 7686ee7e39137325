"""Detection of CUDA graph capture, which only some steps support."""

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor

_IS_CUDA = attrgetter("is_cuda")


def is_capturing(params: Iterable[Tensor]) -> bool:
    """Return True if a step of these parameters would be captured in a CUDA graph."""
    if torch.compiler.is_compiling():
        return False  # traced code does not run yet, and a traced program counts its steps itself
    return any(map(_IS_CUDA, params)) and torch.cuda.is_current_stream_capturing()


def check_not_captured(params: Iterable[Tensor]) -> None:
    """Raise RuntimeError during capture, for a step with coefficients from Python."""
    if is_capturing(params):
        raise RuntimeError(
            "a CUDA graph is being captured. Its replays would repeat the coefficients of this one "
            "step, and count none, since both are Python's work: capture a step of "
            "optimizer.bind(params, capturable=True), or step outside of the graph"
        )
