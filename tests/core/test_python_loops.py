"""Loops in Python, which see layouts, addresses and memory as the native loops do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim.native import LOOPS
from functional_optim.plan.python_loops import PYTHON_LOOPS
from tests.choices import case

pytestmark = pytest.mark.usefixtures("with_loops")

Tensors = list[Tensor]


def example() -> Tensors:
    """Return two written tensors, one transposed, and two read tensors, one without elements."""
    return [torch.zeros(4), torch.zeros(3, 2).t(), torch.ones(4), torch.ones(0, 3)]


WRITTEN = [True, True, False, False]
SLOTS = [2, 0, 1, -1]


def overlapping(tensors: Tensors) -> Tensors:
    memory = torch.zeros(10)
    return [memory[:4], memory[3:9].view(3, 2).t(), *tensors[2:]]


def read_where_written(tensors: Tensors) -> Tensors:
    memory = torch.zeros(12)
    return [memory[2:6], memory[6:].view(3, 2).t(), memory[:4], tensors[3]]


def read_beside(tensors: Tensors) -> Tensors:
    memory = torch.zeros(14)
    return [memory[4:8], memory[8:].view(3, 2).t(), memory[:4], tensors[3]]


def freed(tensors: Tensors) -> Tensors:
    tensors[0].untyped_storage().resize_(0)
    return tensors


CHANGES: dict[str, Callable[[Tensors], Any]] = {
    "others of these layouts": lambda tensors: [torch.empty_like(one) for one in tensors],
    "beside each other": read_beside,
    "two that are written overlap": overlapping,
    "one is read where another is written": read_where_written,
    "another shape": lambda tensors: [torch.zeros(5), *tensors[1:]],
    "other strides": lambda tensors: [tensors[0], torch.zeros(2, 3), *tensors[2:]],
    "another dtype": lambda tensors: [*tensors[:2], tensors[2].double(), tensors[3]],
    "a sparse one": lambda tensors: [*tensors[:2], tensors[2].to_sparse(), tensors[3]],
    "one with gaps": lambda tensors: [torch.zeros(8)[::2], *tensors[1:]],
    "requires a gradient": lambda tensors: [tensors[0].clone().requires_grad_(), *tensors[1:]],
    "computed by autograd": lambda tensors: [torch.zeros(4, requires_grad=True) * 2, *tensors[1:]],
    "freed": freed,
    "no tensor": lambda tensors: [*tensors[:3], None],
    "fewer": lambda tensors: tensors[:3],
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_are_located_as_by_the_native_loops(change: str) -> None:
    native = LOOPS.loaded
    assert native is not None
    tensors = example()
    layouts = [loops.lay_out(tensors, WRITTEN, SLOTS) for loops in (native, PYTHON_LOOPS)]
    for given in (tensors, CHANGES[change](example()), tensors):
        with case(change=change, is_changed=given is not tensors):
            found = [
                loops.locate(layout, given)
                for loops, layout in zip((native, PYTHON_LOOPS), layouts, strict=True)
            ]
            assert found[0] == found[1]
            assert (found[0] is not None) or given is not tensors


def test_nothing_is_located_that_no_pointer_tells() -> None:
    """Layouts of tensors with gaps are recorded, but a kernel gets no pointers to them."""
    assert LOOPS.loaded is not None
    for loops in (LOOPS.loaded, PYTHON_LOOPS):
        for odd in (torch.zeros(3).to_sparse(), None):
            assert loops.lay_out([odd], [True], [0]) is None
        for odd in (torch.zeros(8)[::2], torch.zeros(1).expand(3), torch.zeros(3, device="meta")):
            layout = loops.lay_out([odd], [True], [0])
            assert loops.hold(layout, [odd])
            assert loops.locate(layout, [odd]) is None
