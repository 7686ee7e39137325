"""Norms and squared norms by the native loops, if these have the bits of torch's norms."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.compilers import has_dispatch_mode
from functional_optim._torch.derivatives import is_transforming
from functional_optim.native.loader import LOOPS

_LANES = (4, 8)
"""Doubles in one vector of torch, by processor."""

_KNOWN: dict[Any, int] = {}
"""For the loops, the number of lanes with which they have torch's bits; 0 if there is none."""

_LENGTHS = (0, 1, 3, 8, 21, 100, 1000, 4099)
"""Lengths of the tensors on which the loops are compared with torch."""

SHARED = 1 << 15
"""Number of elements from which torch may use several threads for one sum."""


def native_squares(tensors: list[Tensor], most: int) -> list[float] | None:
    """Return the squared norm of each tensor, or of each of its parts, in float64.

    Args:
        tensors: on the CPU.
        most: elements of a part, except the last part of a tensor. It must be so small that torch
            computes the norm of a part in one thread.

    Returns:
        Numbers with the bits of ``torch.linalg.vector_norm(part, dtype=torch.float64).square()``,
        or None if the loops cannot compute them.
    """
    loops: Any = LOOPS.loaded
    lanes = _KNOWN.get(loops) or _lanes_of(loops)
    if not lanes:
        return None
    found: list[float] | None = loops.squares(tensors, most, lanes, torch.get_num_threads())
    return found


def native_norms(tensors: list[Tensor]) -> list[float] | None:
    """Return the norm of each tensor, in float64.

    Args:
        tensors: on the CPU.

    Returns:
        Numbers with the bits of ``torch.linalg.vector_norm(tensor, dtype=torch.float64)``. None if
        the loops cannot compute them, for example for a large tensor if torch uses several threads.
    """
    loops: Any = LOOPS.loaded
    lanes = _KNOWN.get(loops) or _lanes_of(loops)
    threads = torch.get_num_threads()
    if not lanes or (threads > 1 and max(map(Tensor.numel, tensors), default=0) >= SHARED):
        return None
    found: list[float] | None = loops.norms(tensors, lanes, threads)
    return found


def _lanes_of(loops: Any) -> int:
    """Return the number of lanes with which loops have torch's bits; 0 if none or unknown."""
    lanes = _KNOWN.get(loops)
    if lanes is None and loops is not None and not (is_transforming() or has_dispatch_mode()):
        lanes = _find_lanes(loops)
        _KNOWN.clear()
        _KNOWN[loops] = lanes
    return lanes or 0


def _find_lanes(loops: Any) -> int:
    """Return the number of lanes with which loops have torch's bits; 0 if there is none."""
    with torch.inference_mode(mode=False), torch.no_grad(), torch.device("cpu"):
        draws = torch.Generator().manual_seed(0)
        wide = [torch.randn(n, generator=draws, dtype=torch.float64).exp() for n in _LENGTHS]
        every = [[one.to(kind) for one in wide] for kind in (torch.float32, torch.bfloat16)]
        norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
        wanted = [[norm(one).item() for one in own] for own in every]
        for lanes in _LANES:
            if [loops.norms(own, lanes, 1) for own in every] == wanted:
                return lanes
    return 0
