"""Chains over lists of tensors, run by torch's foreach functions."""

import itertools
from typing import Any

import pytest
import torch

from functional_optim import adamw
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.pieces import PIECE_VARIABLE
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.testing.compare import require_same
from tests.choices import case
from tests.laws.support import TABLE

from ..support import chunk_of, noise

KERNEL = ForeachKernel()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES = (7, 600, 1, 33)
POINTWISE = [
    name
    for name, one in TABLE.items()
    if one.one_chain
    and all(stage.kind == "pointwise" for stage in one.factory().stages)
    and name not in ("nadam", "asgd")  # they read a number of the whole parameter in each step
]


def leaves_of(optimizer: Any, dtype: torch.dtype, step: float, device: str = "cpu") -> list[Any]:
    """Return leaves of several lengths, whose states are not the initial ones."""
    made = []
    for k, size in enumerate(SIZES):
        param, grad = (noise(10 * k + one, size, dtype=dtype) for one in (1, 2))
        leaf = chunk_of(optimizer, param, grad, step)
        param_, grad_, *states = tensors_of(leaf)
        states = [
            noise(10 * k + 3 + place, *one.shape, dtype=one.dtype).abs()
            if one.is_floating_point()
            else one
            for place, one in enumerate(states)
        ]
        there = [one.to(device) for one in (param_, grad_, *states)]
        made.append(with_tensors(leaf, there))
    return made


def stepped(optimizer: Any, leaves: list[Any]) -> tuple[Any, str]:
    """Return copies of the leaves after a step by lists, or the reason why there is none."""
    copies = [with_tensors(one, [t.clone() for t in tensors_of(one)]) for one in leaves]
    columns = [list(column) for column in zip(*map(tensors_of, copies), strict=True)]
    like = max(copies, key=lambda leaf: leaf.param.numel())._replace(entries={})
    totals = totals_of(optimizer, leaves)
    with torch.no_grad():
        for _ in range(2):  # the second call uses the cache
            run = KERNEL.bind_lists(optimizer.stages, like, columns)
        if isinstance(run, str):
            return None, run
        run(totals)
    return [tensors_of(one) for one in copies], ""


def totals_of(optimizer: Any, leaves: list[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for stage in optimizer.stages:
        if getattr(stage, "measure", None) is not None:
            found.append(ReferenceExecutor().measure(optimizer.stages, leaves, found))
    return found


def require_reference(optimizer: Any, dtype: torch.dtype, step: float, device: str = "cpu") -> str:
    """Compare a step by lists with the reference; return the reason if there is no such step."""
    leaves = leaves_of(optimizer, dtype, step, device)
    got, why = stepped(optimizer, leaves)
    if why:
        return why
    totals = totals_of(optimizer, leaves)
    with torch.no_grad():
        ReferenceExecutor().update_(optimizer.stages, leaves, totals)
    require_same("lists and reference", got, [tensors_of(one) for one in leaves])
    return ""


@pytest.mark.parametrize("name", POINTWISE)
def test_it_is_the_reference(name: str) -> None:
    optimizer = TABLE[name].factory()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for step, device in itertools.product((1.0, 7.0), DEVICES):
            with case(dtype=dtype, step=step, device=device):
                assert require_reference(optimizer, dtype, step, device) == ""


def test_lists_are_stepped_in_slabs_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIECE_VARIABLE, "34")
    assert require_reference(adamw(lr=0.1, amsgrad=True), torch.float32, 2.0) == ""
