"""The law of one result: what a step makes of an element does not depend on where that stands.

Torch computes most elements of a tensor in vectors, and the last ones, which fill none, one by one.
Of some operations the two round differently. A rule with such an operation has no result that
blocks, shards or a compiled loop could be equal to: cut elsewhere, it is another.
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
from functional_optim.kernels.validate import rounded_by_place
from functional_optim.optimizer import Optimizer
from functional_optim.plan.item import coefficients_at
from functional_optim.testing.compare import same, tensors_in
from functional_optim.testing.runs import Run
from functional_optim.testing.subject import Subject

ELEMENTS = 511
"""Of a tensor, most of which are computed in vectors."""
PIECE = 3
"""Of one that fills no vector."""


def one_result(subject: Subject, run: Run) -> None:
    """An element is stepped to the same bits wherever it stands.

    Where every stage says ``pointwise``: a tensor gives what it gives in pieces of a few elements.
    Operations such as ``sigmoid``, powers like ``x ** 0.3`` and ``add`` of a number with ``alpha``
    do not, in torch: such a chain is the same bit for bit only where it is never cut, so executors
    step each tensor as it is, and no compiled loop has its bits. Write it with other operations, or
    take the law out, and live with differences of a unit in the last place between shards, buffers
    and machines.
    """
    optimizer = subject.build(run)
    if any(stage.kind != "pointwise" for stage in optimizer.stages):
        return
    if block_size_of(optimizer.stages) > 1:
        return
    drawn = torch.Generator().manual_seed(1)

    def numbers(like: Tensor | None = None) -> Tensor:
        wide = torch.randn(ELEMENTS, generator=drawn, dtype=torch.float64)
        made = wide.to(run.dtype) if like is None else wide.abs().to(like.dtype)
        return made.to(run.device)

    param, grad = numbers(), numbers()
    fresh: Any = optimizer.init(param)
    state: Any = optree.tree_map(
        lambda one: numbers(one) if _is_kept_per_element(one) else one, fresh
    )
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
                raise AssertionError(
                    f"{_named(optimizer, param, grad, state, totals)} rounds by where an element "
                    f"stands: among {ELEMENTS} of {run.dtype}, element {start} and those behind it "
                    f"become {among_many.tolist()}, alone {few.tolist()}"
                )


def _is_kept_per_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() == ELEMENTS


def _cut(tree: Any, start: int) -> Any:
    """A few elements of everything that has as many as the parameter."""

    def part(one: Tensor) -> Tensor:
        return one[start : start + PIECE].clone() if one.shape == (ELEMENTS,) else one

    return optree.tree_map(part, tree)


def _named(
    optimizer: Optimizer, param: Tensor, grad: Tensor, state: Any, totals: list[Tensor]
) -> str:
    """The operation that rounds so, if the chain can be traced; else some operation of it."""
    if optimizer.is_composed:
        return "some operation of this chain"
    stages = optimizer.stages
    hypers, coefficients = coefficients_at(stages, optimizer.hypers_at(()), 1.0)
    leaf = Leaf(param, grad, state.leaves.stages, coefficients, "p", hypers, 1.0)
    try:
        key, numbers, tensors = key_of(stages, leaf)
        traced = trace(stages, key.classes, key.shape)
        found = rounded_by_place(traced, tensors, traced.compute_scalars(numbers, totals), PIECE)
    except UntraceableError:
        found = None
    return f"the operation {found!r}" if found else "some operation of this chain"
