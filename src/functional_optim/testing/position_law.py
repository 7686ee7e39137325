"""The law of one result: the step of an element does not depend on its position in the tensor.

Torch computes most elements of a tensor in vectors, and the last ones, which fill no vector, one by
one. For some operations the two round differently. With such an operation, the result depends on
where a tensor is cut. So blocks, shards and compiled loops cannot give equal bits.
"""

from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim.core.stage import block_size_of
from functional_optim.kernels import Leaf, needs_total
from functional_optim.kernels.cache_key import key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.trace import trace
from functional_optim.kernels.validate import find_rounded_by_place
from functional_optim.optimizer import Optimizer
from functional_optim.plan.item import coefficients_at
from functional_optim.testing.compare import same, tensors_in
from functional_optim.testing.runs import Run
from functional_optim.testing.subject import Subject

ELEMENTS = 511
"""Number of elements of the tensor. Most of them are computed in vectors."""
PIECE = 3
"""Number of elements of a piece, which fills no vector."""


def one_result(subject: Subject, run: Run) -> None:
    """The step of an element has the same bits at any position.

    If every stage is ``pointwise``, pieces of a few elements get the result of the whole tensor.
    Some operations of torch break this law, such as ``sigmoid``, powers like ``x ** 0.3``, and
    ``add`` of a number with ``alpha``. Then bits are equal only without cuts: executors step each
    tensor as a whole, and no compiled loop has these bits. Use other operations, or leave this law
    out, and expect differences of a unit in the last place between shards, buffers and machines.
    """
    optimizer = subject.build(run)
    if any(stage.kind != "pointwise" for stage in optimizer.stages):
        return
    if block_size_of(optimizer.stages) > 1:
        return
    drawn = torch.Generator().manual_seed(1)

    def numbers(like: Tensor | None = None) -> Tensor:
        wide = torch.randn(ELEMENTS, generator=drawn, dtype=torch.float64)
        narrow = wide.to(run.dtype) if like is None else wide.abs().to(like.dtype)
        return narrow.to(run.device)

    param, grad = numbers(), numbers()
    fresh: Any = optimizer.init(param)
    state: Any = optree.tree_map(lambda one: numbers(one) if _is_per_element(one) else one, fresh)
    totals: list[Tensor] = []
    for stage in optimizer.stages:
        if needs_total(stage):
            totals.append(optimizer.measure(param, grad, state, measured=totals))
    whole = optimizer.update(param, grad, state, measured=totals)
    for start in range(0, ELEMENTS, PIECE):
        piece = optimizer.update(
            *(_cut(one, start) for one in (param, grad, state)), measured=totals
        )
        for few, among_many in zip(tensors_in(piece), tensors_in(_cut(whole, start)), strict=True):
            if not same(few, among_many):
                operation = _find_operation(optimizer, param, grad, state, totals)
                raise AssertionError(
                    f"the rounding of {operation} depends on the position of an element: in a "
                    f"tensor of {ELEMENTS} elements of {run.dtype}, the elements from {start} on "
                    f"become {among_many.tolist()}, but alone {few.tolist()}"
                )


def _is_per_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() == ELEMENTS


def _cut(tree: Any, start: int) -> Any:
    """Return a tree with a piece of each tensor that has as many elements as the parameter."""

    def part(one: Tensor) -> Tensor:
        return one[start : start + PIECE].clone() if one.shape == (ELEMENTS,) else one

    return optree.tree_map(part, tree)


def _find_operation(
    optimizer: Optimizer, param: Tensor, grad: Tensor, state: Any, totals: list[Tensor]
) -> str:
    """Return the operation that rounds by position, if the chain can be traced."""
    if optimizer.is_composed:
        return "some operation of this chain"
    stages = optimizer.stages
    hypers, coefficients = coefficients_at(stages, optimizer.hypers_at(()), 1.0)
    leaf = Leaf(param, grad, state.leaves.stages, coefficients, "p", hypers, 1.0)
    try:
        key, numbers, tensors = key_of(stages, leaf)
        traced = trace(stages, key.classes, key.shape)
        found = find_rounded_by_place(
            traced, tensors, traced.compute_scalars(numbers, totals), PIECE
        )
    except UntraceableError:
        found = None
    return f"the operation {found!r}" if found else "some operation of this chain"
