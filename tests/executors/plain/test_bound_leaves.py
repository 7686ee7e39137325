"""Planned steps of matrices: the reference's bits, few calls, and correct step counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    kl_soap,
    lamb,
    muon,
    partition,
    shampoo,
    soap,
)
from functional_optim.kernels import leaf_binder, stacks
from functional_optim.kernels.cache import Cache

from ...choices import case
from ..support import assert_same, noise

SHAPES = ((4, 6), (4, 6), (40, 30), (40, 30), (40, 30), (7,), (), (0, 3), (3, 2, 2))
MATRICES = ((4, 6), (4, 6), (40, 30), (40, 30), (40, 30), (2, 8))
CHAINS: dict[str, tuple[Callable[[], Optimizer], tuple[tuple[int, ...], ...]]] = {
    "lamb": (lambda: lamb(lr=0.1), SHAPES),
    "clipped lamb": (lambda: chain(clip_by_global_norm(0.5), lamb(lr=0.1)), SHAPES),
    "muon": (lambda: muon(lr=0.1), MATRICES),
    "soap": (lambda: soap(lr=0.1), MATRICES),
    "shampoo": (lambda: shampoo(lr=0.1), MATRICES),
    "kl_soap": (lambda: kl_soap(lr=0.1), MATRICES),
    "parts": (
        lambda: partition(
            {"matrix": muon(lr=0.1), "rest": adamw(lr=0.1)},
            lambda path, shape: "matrix" if len(shape) == 2 and min(shape) else "rest",
        ),
        SHAPES,
    ),
}


def set_grads(params: list[Any], seed: int) -> None:
    """Set gradients: some missing, some transposed, one in the memory of a parameter."""
    for k, param in enumerate(params):
        grad = noise(1000 * seed + k, *param.shape, dtype=param.dtype)
        if k == 3 and seed % 3 == 1:
            grad = grad.t().contiguous().t()
        param.grad = None if k == seed % 4 and seed > 3 else grad
    if seed == 6:
        params[1].grad = params[0].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHAINS)
def test_bits_are_the_references(name: str, dtype: torch.dtype) -> None:
    make, shapes = CHAINS[name]
    if dtype == torch.bfloat16 and name in ("soap", "shampoo", "kl_soap"):
        shapes = shapes[:2]  # their eigenvectors take long
    ours, theirs = (
        [Parameter(noise(k, *shape, dtype=dtype)) for k, shape in enumerate(shapes)]
        for _ in range(2)
    )
    optimizer = TorchOptimizer(ours, make())
    other = TorchOptimizer(theirs, make().using(executor="reference"))
    for seed in range(10):
        for params, one in ((ours, optimizer), (theirs, other)):
            set_grads(params, seed)
            one.param_groups[0]["lr"] = 0.1 if seed < 5 else 0.1 / seed
            one.step()
        with case(step=seed):
            assert_same([one.detach() for one in ours], [one.detach() for one in theirs])
    for mine, wanted in zip(ours, theirs, strict=True):
        kept, want = optimizer.state[mine], other.state[wanted]
        assert kept.keys() == want.keys()
        for key in kept:
            if isinstance(kept[key], Tensor):
                assert_same(kept[key], want[key])


def test_a_step_that_is_broken_off_counts_what_was_stepped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [Parameter(noise(k, 3 + k, 4)) for k in range(4)]
    optimizer = TorchOptimizer(params, muon(lr=0.1))

    def step() -> None:
        for k, param in enumerate(params):
            param.grad = noise(10 + k, *param.shape)
        optimizer.step()

    for _ in range(3):
        step()
    bound = leaf_binder.LeafBinder._calls

    def broken(self: Any, *args: Any) -> Any:
        parts = bound(self, *args)

        def fail() -> None:
            raise MemoryError("of a test")

        return [*parts[:2], (parts[2][0], fail), *parts[3:]]

    before = [one.detach().clone() for one in params]
    monkeypatch.setattr(leaf_binder.LeafBinder, "_calls", broken)
    with pytest.raises(MemoryError, match="of a test"):
        step()
    moved = [not torch.equal(a, b) for a, b in zip(before, params, strict=True)]
    counts = [int(optimizer.state[one]["step"]) for one in params]
    assert moved == [True, True, False, False]
    assert counts == [4, 4, 3, 3]
    monkeypatch.undo()
    step()
    assert [int(optimizer.state[one]["step"]) for one in params] == [5, 5, 4, 4]


def test_stacks_are_bound_once_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_EVIDENCE", Cache())
    monkeypatch.setattr(stacks, "EVIDENCE", 4 * 4 * 32 * 32)
    sizes: list[int] = []
    step = leaf_binder._step_stack

    def noted(known: Any, columns: Any, rest: Any) -> None:
        sizes.append(len(columns[0]))
        step(known, columns, rest)

    monkeypatch.setattr(leaf_binder, "_step_stack", noted)
    params = [Parameter(noise(k, 32, 32)) for k in range(5)]
    optimizer = TorchOptimizer(params, muon(lr=0.1))
    found = []
    for number in range(9):
        for k, param in enumerate(params):
            param.grad = noise(100 * number + k, 32, 32)
        optimizer.step()
        found.append(len(sizes))
    assert found[-1] - found[-2] == found[-2] - found[-3] == 1
    assert found[0] == 0
    assert set(sizes) == {4}


def test_matrices_that_share_memory_are_stepped_one_after_the_other() -> None:
    """Each matrix gets the values that the step before it has written."""
    found = []
    for executor in ("auto", "reference"):
        memory = noise(0, 5, 5)
        params = [Parameter(memory), Parameter(memory.t()), Parameter(noise(1, 5, 5))]
        optimizer = TorchOptimizer(params, lamb(lr=0.1).using(executor=executor))
        for number in range(5):
            for k, param in enumerate(params):
                param.grad = noise(100 * number + k, 5, 5)
            optimizer.step()
        found.append([one.detach().clone() for one in params])
    assert_same(*found)
