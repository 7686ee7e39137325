"""Initial states of large parameters, computed piece by piece."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_optim.core.leaf import PLAIN
from functional_optim.core.stage import in_full_blocks
from functional_optim.core.state import map_state, state_tensors

PIECE = 1 << 20
"""Number of elements of a piece."""


def can_init_in_pieces(param: Tensor) -> bool:
    """Return True for a plain, contiguous parameter that is larger than a piece."""
    is_plain = type(param) in PLAIN and not param.is_meta and param.is_contiguous()
    return is_plain and param.numel() > PIECE


def init_in_pieces(init: Callable[[Tensor], Any], param: Tensor, block_size: int) -> Any:
    """Return the initial state of a parameter, computed in pieces to save memory.

    Float32 values and their codes take up to 40 bytes per element while they are computed. All
    tensors of the state have one value for each element, for each block, or for the whole
    parameter.
    """
    flat, count, size = param.detach().view(-1), param.numel(), in_full_blocks(PIECE, block_size)
    first = init(flat[:size])
    known = {size, size // block_size}
    if any(one.dim() and one.numel() not in known for one in state_tensors([first])):
        return init(param)

    def allocated(one: Tensor) -> Tensor:
        if one.dim() == 0:
            return one
        return one.new_empty(param.shape if one.numel() == size else -(-count // block_size))

    made = map_state(allocated, first)
    for piece, start in enumerate(range(0, count, size)):
        values = init(flat[start : start + size]) if piece else first

        def write(into: Tensor, one: Tensor, values: Tensor, piece: int = piece) -> Tensor:
            if one.dim():
                into.view(-1).narrow(0, piece * one.numel(), values.numel()).copy_(values)
            return into

        map_state(write, made, first, values)
    return made
