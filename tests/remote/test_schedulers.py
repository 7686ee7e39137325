"""Schedulers of torch, which change the options of the workers."""

from typing import Any

import pytest
import torch

from functional_optim import DistributedOptimizer
from tests.front_ends.test_lr_schedulers import ALL, STEPS, advance

from .support import assert_same, gradients, parameters, placement


@pytest.mark.parametrize("name", ALL)
def test_every_scheduler_of_torch(name: str) -> None:
    """Every scheduler of torch drives two groups, one of which is on a single worker."""

    def grouped(own: Any) -> list[dict[str, Any]]:
        pairs = list(own.items())
        return [{"params": pairs[:1], "lr": 0.02}, {"params": pairs[1:]}]

    params, twins = parameters(), parameters()
    where = placement(2)
    optimizer = DistributedOptimizer.over_threads(torch.optim.AdamW, grouped(params), where, lr=0.1)
    twin = torch.optim.AdamW(grouped(twins), lr=0.1, foreach=False)
    both: list[torch.optim.Optimizer] = [optimizer, twin]
    schedulers = [ALL[name](one) for one in both]
    for step in range(STEPS):
        given = gradients(step, ("scale",) if step == 1 else ())
        for key, grad in given.items():
            twins[key].grad = grad
        optimizer.step(given)
        twin.step()
        for one in schedulers:
            advance(one, step)
    optimizer.close()
    assert_same(params, twins)
    for group, wanted in zip(optimizer.param_groups, twin.param_groups, strict=True):
        assert (group["lr"], group["betas"]) == (wanted["lr"], wanted["betas"])
