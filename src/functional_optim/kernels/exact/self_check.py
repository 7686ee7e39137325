"""Bitwise comparison of a compiled loop with torch's operations, before its first step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.bit_equality import same_bits
from functional_optim.kernels.exact.values import INTEGERS
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.validate import evaluate

LENGTHS = (3, 1_031, 20_011)
"""Numbers of elements: less than a vector, more than a block, and enough to show rare roundings.
None is a multiple of a vector, because some of torch's kernels round the last elements differently.
"""
SHORT_LENGTHS = (*LENGTHS, 200_003)
"""Numbers of elements for 16-bit floats, which torch rounds differently at the end of the share of
each thread."""

_EXPONENTS = {torch.float16: (-9, 5)}
_ORDINARY = (-30, 8)
"""Range of the exponents of random numbers."""

Loop = Callable[[Sequence[Tensor], Sequence[Any]], None]
"""``run(tensors, numbers)`` steps tensors (parameter, gradient, state) in place."""


def is_exact(
    run: Loop, trace: Trace, like: Sequence[Tensor], scalar_args: Sequence[Any], block_size: int
) -> bool:
    """Return True if a loop has the bits of the graph.

    Trials use random numbers of all magnitudes, nonnegative states, zeros, denormals, infinities
    and NaN. Two NaNs count as equal, whatever their bits. A chain that reads signs, such as one
    with 8-bit codes, is tried on finite numbers only, because processors do not define the sign of
    NaN.
    """
    drawn = torch.Generator().manual_seed(1)
    count = like[0].numel()
    finite = any("signbit" in str(node.target) for node in trace.graph.nodes)
    short = any(tensor.is_floating_point() and tensor.element_size() == 2 for tensor in like)
    cases = ((False, False, 0), (True, False, 1), (True, True, 2))
    for length in SHORT_LENGTHS if short else LENGTHS:
        for positive, special, other in cases:
            numbers = _others(scalar_args, drawn, other) if other else scalar_args
            theirs = [
                _sample(
                    length if tensor.numel() == count else -(-length // block_size),
                    tensor.dtype,
                    drawn,
                    positive=positive and place > 1,
                    special=(7 if finite else 10) * special,
                )
                for place, tensor in enumerate(like)
            ]
            ours = [tensor.clone() for tensor in theirs]
            run(ours, numbers)
            made = evaluate(trace, theirs, numbers)
            for (_, place), one in zip(trace.results, made, strict=True):
                theirs[place] = one
            if not all(map(same_bits, ours, theirs)):
                return False
    return True


def _others(scalar_args: Sequence[Any], drawn: torch.Generator, case: int) -> list[Any]:
    """Return other scalars, below or above 0.5, where ``lerp`` changes its formula."""
    made = torch.rand(len(scalar_args), generator=drawn, dtype=torch.float64) / 2 + (case - 1) / 2
    return [
        one if isinstance(one, Tensor) or abs(one) > LARGE else value
        for one, value in zip(scalar_args, made.tolist(), strict=True)
    ]


LARGE = 1_000.0
"""Scalars above this value are not replaced: they are no factors, but for example seeds."""


def _sample(
    count: int, dtype: torch.dtype, drawn: torch.Generator, *, positive: bool, special: int
) -> Tensor:
    if dtype in INTEGERS or dtype == torch.bool:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max
        low = 0 if dtype in (torch.bool, torch.uint8) else -high
        return torch.randint(low, high, (count,), generator=drawn).to(dtype)
    exponents = _EXPONENTS.get(dtype, _ORDINARY)
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # float32 is drawn faster
    magnitude = torch.randint(*exponents, (count,), generator=drawn).to(wide).exp2()
    found = (torch.randn(count, generator=drawn, dtype=wide) * magnitude).to(dtype)
    found = found.abs() if positive else found
    if not special:
        return found
    tiny = torch.finfo(dtype).tiny
    large, inf = min(1e30, torch.finfo(dtype).max), float("inf")
    odd = [0.0, -0.0, tiny / 8, -tiny / 8, tiny, large, -large, inf, -inf, float("nan")]
    values = torch.tensor(odd[:special], dtype=torch.float64).to(dtype)
    which = torch.randint(special, (count,), generator=drawn)
    return torch.where(torch.rand(count, generator=drawn) < 0.1, values[which], found)
