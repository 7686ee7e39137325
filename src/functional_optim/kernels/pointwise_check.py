"""Check that stages which declare that they are pointwise compute with one element at a time.

Kernels join and cut the leaves of pointwise stages, and step a matrix as a vector.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.hyper import map_values
from functional_optim.core.leaf import Leaf, Scalars, Stepped, check_kept, is_measured
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.stage_contract import call_stage
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.kernels.lowering import TensorScalarMode
from functional_optim.kernels.validate import WHOLE, trial_numbers

CUT = 11
MATRIX = (4, 6)
"""A pointwise stage has the same results for ``WHOLE`` elements in a vector, in this matrix, and in
two parts that meet at ``CUT``. No part is a multiple of the size of a processor's vectors.
"""
ULPS = 64.0
"""Largest difference by which a result may depend on the position of an element."""

NONZERO = 0.5
"""Stand-in for a coefficient that is zero: no result may be multiplied by zero in the check."""


def check_pointwise_stages(stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> None:
    """Call each stage on a few elements, to check that it computes with one at a time."""
    device = chunk.param.device
    if device.type == "meta" or block_size_of(stages) > 1:
        return
    left = iter(totals)
    on_device = chunk.scalars is Scalars.DEVICE
    functions: Any = TensorScalarMode() if on_device else nullcontext()
    # Torch's random number generator is not restored: other threads may draw at the same time.
    with torch.no_grad(), functions:
        for stage, state, given in zip(stages, chunk.states, chunk.coefficients, strict=True):
            sums = [next(left).to(device)] if is_measured(stage) else []
            nonzero = map_values(float, lambda number: number or NONZERO, given)
            for coefficients in [given] if nonzero == given else [given, nonzero]:
                leaf = chunk._replace(states=(state,), coefficients=(coefficients,))
                _check_stage(stage, leaf, sums)


def _check_stage(stage: Stage, leaf: Leaf, sums: Sequence[Tensor]) -> None:
    shape = leaf.param.shape
    tensors = [
        _trial(one, k) if one.shape == shape else one for k, one in enumerate(tensors_of(leaf))
    ]

    def run(rows: slice, view: tuple[int, ...] = (-1,)) -> list[Tensor]:
        few = [
            one[rows].clone().view(view) if one.shape == (WHOLE,) else one.clone()
            for one in tensors
        ]
        own = with_tensors(leaf, few)
        made = call_stage(
            stage, own.param, own.grad, own.states[0], own.coefficients[0], sums, own.grad
        )
        stepped = own._replace(param=made[0], grad=made[1], states=(made[2],))
        check_kept(own, Stepped(stepped.param, stepped.states))
        return tensors_of(stepped)

    every = slice(None)
    whole = run(every)
    parts = zip(run(slice(CUT)), run(slice(CUT, None)), strict=True)
    joined = [torch.cat([a, b]) if a.dim() and b.dim() else a for a, b in parts]
    for own, one in zip(joined, whole, strict=True):
        if not _is_close(own, one):
            if not all(map(_is_close, whole, run(every))):
                return  # the stage draws random numbers, so results cannot be compared
            raise NotPointwiseError(
                f"{stage.name} declares that it is pointwise, but stepping {WHOLE} elements in two "
                f"parts changes the result: {_example(own, one)}; give that stage kind='per_matrix'"
            )
    other = (
        f"{stage.name} declares that it is pointwise, but its result for a matrix differs from its "
        "result for the flat elements; give that stage kind='per_matrix', or pass the values that "
        "it reads from the shape as a hyper-parameter, by override()"
    )
    try:
        matrix = run(every, MATRIX)
    except (RuntimeError, IndexError) as error:
        raise NotPointwiseError(f"{other}: it takes none ({error})") from error
    if not all(_is_close(a.reshape(b.shape), b) for a, b in zip(matrix, whole, strict=True)):
        raise NotPointwiseError(other)


def _trial(like: Tensor, index: int) -> Tensor:
    """Return numbers of both signs for parameter and gradient, and positive ones for a state."""
    numbers = trial_numbers(like, index)
    return numbers.abs() if index > 1 and like.is_floating_point() else numbers


def _example(joined: Tensor, whole: Tensor) -> str:
    """Return the first element that differs, with its values."""
    if joined.shape != whole.shape:
        return f"it has shape {tuple(whole.shape)}, and in parts {tuple(joined.shape)}"
    k = int((joined != whole).int().argmax())
    return f"element {k} becomes {whole[k].item()}, and in parts {joined[k].item()}"


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return True if tensors are equal up to rounding."""
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    finfo = torch.finfo(a.dtype)
    return torch.allclose(
        a.double(), b.double(), rtol=ULPS * finfo.eps, atol=finfo.tiny, equal_nan=True
    )
