"""Addition in rank order, so that the result depends on nothing but the addends."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 17
"""Elements added at a time: with one running sum in the cache, memory is read once for each term
and written once."""


def add_in_rank_order(own: Tensor, rank: int, others: Sequence[Tensor], divisor: int = 1) -> None:
    """``own = ((t_0 / d + t_1 / d) + t_2 / d) + ...``; ``t_rank`` is what ``own`` holds before.

    Each term is divided by itself, in its own dtype, before it is added. float16 and bfloat16 are
    added in float32 and rounded once. The tensors in ``others`` are used as scratch.

    Args:
        own: a tensor of one dimension.
        rank: its place among the terms.
        others: the other terms, in order.
        divisor: d.
    """
    terms = [*others[:rank], own, *others[rank:]]
    wide = None
    if own.dtype in {torch.float16, torch.bfloat16}:
        wide = own.new_empty(min(BLOCK, own.numel()), dtype=torch.float32)
    with torch.no_grad():
        # Views of all blocks at once: to slice each of them would take as long as to add it.
        for block in zip(*(term.split(BLOCK) for term in terms), strict=True):
            for term in block:
                divided(term, divisor, term)
            if wide is None:
                _add(block, rank)
            else:
                _add_wide(block, rank, wide[: block[0].numel()])


def divided(term: Tensor, divisor: int, out: Tensor) -> None:
    """``out = term / divisor``; the two may be the same."""
    with torch.no_grad():
        if divisor == 1:
            if out is not term:
                out.copy_(term)
        elif divisor & (divisor - 1) == 0:
            # The same numbers: the reciprocal is exact, and it takes less time.
            torch.mul(term, 1 / divisor, out=out)
        else:
            torch.div(term, divisor, out=out)


def _add(block: Sequence[Tensor], rank: int) -> None:
    total = block[0]
    for place, term in enumerate(block[1:], 1):
        # The sum moves into our own memory as soon as our own term has been added.
        total = torch.add(total, term, out=term if place == rank else total)


def _add_wide(block: Sequence[Tensor], rank: int, total: Tensor) -> None:
    total.copy_(block[0])
    for term in block[1:]:
        total.add_(term)
    block[rank].copy_(total)
