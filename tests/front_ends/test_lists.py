"""Steps by lists of tensors, planned as on an accelerator, but run on the CPU."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    lion,
    rprop,
    schedule_free_adamw,
    sgd,
)
from functional_optim.kernels import EXECUTORS, KernelExecutor, register_executor
from functional_optim.kernels.foreach import ForeachKernel
from tests.choices import case

from .support import assert_same_tensors, noise

PLAIN = ((3, 4), (37,), (), (2, 3))
SHAPES = (*PLAIN, (0,), (5, 3))

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(lr=0.1),
    "sgd with momentum": lambda: sgd(lr=0.1, momentum=0.9, weight_decay=0.1),
    "lion": lambda: lion(lr=0.01),
    "rprop": lambda: rprop(lr=0.01),
    "clipped": lambda: chain(clip_by_global_norm(0.5), adamw(lr=0.1)),
    "accumulated": lambda: chain(accumulate(2), clip_by_global_norm(0.5), sgd(lr=0.1)),
    "schedule-free": lambda: schedule_free_adamw(lr=0.1),
}


class Noting(ForeachKernel):
    """Kernel that records the number of leaves in each list."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def bind_lists(self, stages: Any, like: Any, columns: Any) -> Any:
        self.lengths.append(len(columns[0]))
        return super().bind_lists(stages, like, columns)


@pytest.fixture
def kernel() -> Iterator[Noting]:
    made = Noting()
    register_executor("by lists", KernelExecutor(ForeachKernel(), listings=[made]))
    yield made
    del EXECUTORS["by lists"]


def parameters() -> list[Parameter]:
    made = [noise(k, *shape) for k, shape in enumerate(SHAPES)]
    made[-1] = made[-1].t().contiguous().t()
    return [Parameter(one) for one in made]


def set_grads(params: list[Parameter], seed: int, without: int) -> None:
    for k, param in enumerate(params):
        grad = noise(1000 * seed + k, *param.shape)
        # The gradient of the first parameter has other strides in some steps.
        if k == 0 and seed % 3 == 2:
            grad = grad.t().contiguous().t()
        param.grad = None if k == without else grad


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_front_ends_have_the_bits_of_the_reference(name: str, kernel: Noting) -> None:
    by_lists: Any = "by lists"
    ours, theirs = parameters(), parameters()
    optimizer = TorchOptimizer(ours, OPTIMIZERS[name]().using(executor=by_lists))
    other = TorchOptimizer(theirs, OPTIMIZERS[name]().using(executor="blocked"))
    for seed in range(8):
        for params in (ours, theirs):
            set_grads(params, seed, without=1 if seed % 4 == 3 else -1)
        optimizer.step()
        other.step()
        if seed == 4:
            for one in (optimizer, other):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
        with case(step=seed):
            assert_same_tensors(ours, theirs)
    assert max(kernel.lengths, default=0) > 1


def test_trees_are_stepped_without_the_native_loops_too(kernel: Noting) -> None:
    by_lists: Any = "by lists"
    optimizer = OPTIMIZERS["clipped"]()
    stepping = optimizer.using(executor=by_lists)
    params = [noise(k, *shape) for k, shape in enumerate(PLAIN)]
    pure, state, own = params, optimizer.init(params), optimizer.init(params)
    params = [one.clone() for one in params]
    for seed in range(5):
        grads = [noise(1000 * seed + k, *one.shape) for k, one in enumerate(params)]
        pure, state = optimizer.update(pure, grads, state)
        stepping.update_(params, grads, own)
        with case(step=seed):
            assert_same_tensors(params, pure)


def test_nothing_is_written_where_a_gradient_does_not_fit(kernel: Noting) -> None:
    by_lists: Any = "by lists"
    params = parameters()
    optimizer = TorchOptimizer(params, adamw(lr=0.1).using(executor=by_lists))
    for seed in range(3):
        set_grads(params, seed, without=-1)
        optimizer.step()
    before = [param.detach().clone() for param in params]
    params[2].grad = None
    params[1].grad = torch.sparse_coo_tensor([[0]], [1.0], (37,), check_invariants=True)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="1"):
        optimizer.step()
    assert_same_tensors(params, before)
