"""Tests on a device of rules for whole tensors: programs have the bits of the reference."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from functional_optim import Optimizer, TorchOptimizer
from tests.executors.plain.test_bound_leaves import CHAINS
from tests.front_ends.support import noise
from tests.steady import every_call_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SHAPES = ((6, 4), (4, 6), (64, 32), (64, 32), (64, 32), (5, 4), (1, 7), (33, 65))


def set_grads(params: list[Parameter], seed: int, without: int = -1) -> None:
    for k, param in enumerate(params):
        grad = noise(1000 * seed + k, *param.shape, dtype=param.dtype).cuda()
        param.grad = None if k == without else grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHAINS)
def test_bits_are_the_references(name: str, dtype: torch.dtype) -> None:
    make, _ = CHAINS[name]
    pairs = [
        [Parameter(noise(k, *shape, dtype=dtype).cuda()) for k, shape in enumerate(SHAPES)]
        for _ in range(2)
    ]
    optimizers = [
        TorchOptimizer(pairs[0], make()),
        TorchOptimizer(pairs[1], make().using(executor="reference")),
    ]
    for seed in range(8):
        for params, one in zip(pairs, optimizers, strict=True):
            set_grads(params, seed, without=seed % 3)
            one.param_groups[0]["lr"] = 0.1 if seed < 4 else 0.1 / seed
            one.step()
        for ours, theirs in zip(*pairs, strict=True):
            assert torch.equal(ours, theirs), (seed, ours.shape)
    for ours, theirs in zip(*pairs, strict=True):
        kept, want = (one.state[p] for one, p in zip(optimizers, (ours, theirs), strict=True))
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, want[key]), key


def calls_of(make: Callable[[], Optimizer], count: int) -> int:
    """Count the calls of Python functions in a warm step of matrices with different shapes."""
    params = [Parameter(noise(k, 10, 10 + k).cuda()) for k in range(count)]
    set_grads(params, 1)
    optimizer = TorchOptimizer(params, make())
    for _ in range(6):
        optimizer.step()
    return every_call_of(optimizer.step)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_a_leaf_costs_few_calls_of_python(name: str) -> None:
    """A leaf costs only the calls of its program, and of the memory for temporaries."""
    make, _ = CHAINS[name]
    assert calls_of(make, 40) - calls_of(make, 10) <= 30 * 40


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_memory_of_temporaries_is_freed(name: str) -> None:
    make, _ = CHAINS[name]
    params = [Parameter(noise(k, 256, 100 + k).cuda()) for k in range(30)]
    optimizer = TorchOptimizer(params, make())
    for seed in range(4):
        set_grads(params, seed)
        optimizer.step()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.memory_allocated() == held
    largest = max(param.numel() for param in params)
    # The temporaries of only one leaf exist at a time.
    assert torch.cuda.max_memory_allocated() - held <= 12 * 4 * largest
