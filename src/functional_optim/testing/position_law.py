"""The law of one result: the step of an element does not depend on its position in the tensor.

Torch computes most elements of a tensor in vectors, and the last ones, which fill no vector, one by
one. For some operations the two round differently. With such an operation, the result depends on
where a tensor is cut. So blocks, shards and compiled loops cannot give equal bits.
"""

from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.core.stage import block_size_of
from functional_optim.kernels import needs_total
from functional_optim.optimizer import Optimizer
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

    def part(one: Any) -> Any:
        is_whole = isinstance(one, Tensor) and one.shape == (ELEMENTS,)
        return one[start : start + PIECE].clone() if is_whole else one

    return optree.tree_map(part, tree)


class _Operations(TorchFunctionMode):
    """Mode that finds the first operation whose rounding depends on the position of an element."""

    found: str = "some operation of this chain"

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given: Any = (args, kwargs or {})
        pieces = []
        if self.found == _Operations.found and any(map(_is_per_element, optree.tree_leaves(given))):
            for start in range(0, ELEMENTS, PIECE):
                few, named = _cut(given, start)
                pieces.append(function(*few, **named))
        whole = function(*args, **given[1])
        for place, few in enumerate(pieces):
            if _is_per_element(whole) and not same(few, _cut(whole, PIECE * place)):
                self.found = f"the operation {function.__name__.strip('_')!r}"
        return whole


def _find_operation(
    optimizer: Optimizer, param: Tensor, grad: Tensor, state: Any, totals: list[Tensor]
) -> str:
    """Return the operation that rounds by position, if it is a call of a function of torch."""
    operations = _Operations()
    with operations:
        optimizer.using(executor="reference").update(param, grad, state, measured=totals)
    return operations.found
