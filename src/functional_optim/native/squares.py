"""Squares of norms by the native loops, where these give the bits of torch's norms."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from functional_optim.native.loader import LOOPS

_LANES = (4, 8)
"""Doubles in one of torch's vectors, by processor."""

_LENGTHS = (0, 1, 3, 8, 21, 100, 1000, 4099)
"""Of the tensors on which the loops are held against torch."""


def native_squares(tensors: list[Tensor], most: int) -> list[float] | None:
    """Return the square of the norm of each tensor, or of each of its parts, in float64.

    Args:
        tensors: on the CPU.
        most: elements of a part, the last of a tensor excepted; so few that torch computes the norm
            of a part in one thread.

    Returns:
        Numbers with the bits of ``torch.linalg.vector_norm(part, dtype=torch.float64).square()``.
        None where the loops do not give them.
    """
    loops: Any = LOOPS.loaded
    lanes = None if loops is None else _lanes_of(loops)
    if loops is None or lanes is None:
        return None
    found: list[float] | None = loops.squares(tensors, most, lanes, torch.get_num_threads())
    return found


@lru_cache(maxsize=1)
def _lanes_of(loops: Any) -> int | None:
    """Return the number of lanes with which the loops have torch's bits; None if there is none."""
    with torch.inference_mode(mode=False), torch.no_grad(), torch.device("cpu"):
        draws = torch.Generator().manual_seed(0)
        wide = [torch.randn(n, generator=draws, dtype=torch.float64).exp() for n in _LENGTHS]
        every = [[one.to(kind) for one in wide] for kind in (torch.float32, torch.bfloat16)]
        wanted = [[_square(one) for one in own] for own in every]
        for lanes in _LANES:
            if [loops.squares(own, max(_LENGTHS), lanes, 1) for own in every] == wanted:
                return lanes
    return None


def _square(tensor: Tensor) -> float:
    norm: Any = torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float64)
    return float(norm.square())
