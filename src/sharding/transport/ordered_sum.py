"""Addition in rank order, so that the bits of a sum depend on the addends only."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 17
"""Elements per block. The running sum of a block fits the cache, so memory is read once per term
and written once."""


def add_in_rank_order(own: Tensor, rank: int, others: Sequence[Tensor], divisor: int = 1) -> None:
    """Compute ``own = ((t_0 / d + t_1 / d) + t_2 / d) + ...`` in place; ``t_rank`` is ``own``.

    Each term is divided in its own dtype before it is added. float16 and bfloat16 are added in
    float32 and rounded once. The tensors in ``others``, the other terms in order, are overwritten.
    """
    terms = [*others[:rank], own, *others[rank:]]
    wide = None
    if own.dtype in {torch.float16, torch.bfloat16}:
        wide = own.new_empty(min(BLOCK, own.numel()), dtype=torch.float32)
    with torch.no_grad():
        # One call of split makes all views: slicing each block takes as long as adding it.
        for block in zip(*(term.split(BLOCK) for term in terms), strict=True):
            for term in block:
                divide_into(term, divisor, term)
            if wide is None:
                _add(block, rank)
            else:
                _add_wide(block, rank, wide[: block[0].numel()])


def divide_into(term: Tensor, divisor: int, out: Tensor) -> None:
    """Compute ``out = term / divisor``; both can be the same tensor."""
    with torch.no_grad():
        if divisor == 1:
            if out is not term:
                out.copy_(term)
        elif divisor & (divisor - 1) == 0:
            # The reciprocal of a power of two is exact, and a product is faster than a quotient.
            torch.mul(term, 1 / divisor, out=out)
        else:
            torch.div(term, divisor, out=out)


def _add(block: Sequence[Tensor], rank: int) -> None:
    total = block[0]
    for place, term in enumerate(block[1:], 1):
        # From this rank's own term on, the sum is written to the memory of that term.
        total = torch.add(total, term, out=term if place == rank else total)


def _add_wide(block: Sequence[Tensor], rank: int, total: Tensor) -> None:
    total.copy_(block[0])
    for term in block[1:]:
        total.add_(term)
    block[rank].copy_(total)
