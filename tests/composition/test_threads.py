"""Threads that step trees with the same structure at once, and so share the plans."""

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import adamw, chain, clip_by_global_norm, partition, sgd
from tests.tensors import assert_same

NAMES = [f"p{k}" for k in range(6)]
OPTIMIZER = partition(
    {"0": chain(clip_by_global_norm(1.0), sgd(lr=0.1)), "1": adamw(lr=0.05)},
    lambda path, _: str(int(path[-1][-1]) % 2),
)
"""The optimizer of all threads."""


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def trained(seed: int, *, in_place: bool) -> Any:
    """Return the parameters after steps in which random gradients are missing."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def tensor() -> Tensor:
        return torch.randn(3, generator=generator)

    params = {name: tensor() for name in NAMES}
    state = OPTIMIZER.init(params)
    for _ in range(120):
        grads = {name: None if drawn.random() < 0.4 else tensor() for name in NAMES}
        if in_place:
            OPTIMIZER.update_(params, grads, state)
        else:
            params, state = OPTIMIZER.update(params, grads, state)
    return params


@pytest.mark.parametrize("in_place", [True, False], ids=["update_", "update"])
def test_each_thread_has_the_numbers_of_a_thread_alone(in_place: bool) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: trained(seed, in_place=in_place), range(4)))
    assert_same(found, [trained(seed, in_place=in_place) for seed in range(4)])
