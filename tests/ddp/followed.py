"""A bound optimizer that follows the buckets of DDP, beside torch.optim on a twin."""

import copy
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from functional_optim import sgd
from functional_optim.optimizer import bound_plans
from functional_optim.plan.flat.layout import FlatLayout

from .models import BATCH, WIDTH, Tower

CAP_MB = 0.04
"""So that there are several buckets."""
FOLLOWS = 2
"""The first iteration after which DDP's buckets stay as they are."""
ITERATIONS = 4


def run_followed(views: bool) -> dict[str, Any]:
    """Train both.

    Args:
        views: whether gradients are views of DDP's buckets.

    Returns:
        After each iteration whether the parameters are equal, how often gradients were gathered in
        it, and in the end in how many storages they lie.
    """
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Tower()
    twin = copy.deepcopy(model)
    mine = DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=CAP_MB)
    other = DistributedDataParallel(twin, bucket_cap_mb=CAP_MB)
    bound = sgd(0.05, momentum=0.9).using(executor="compile").bind(dict(model.named_parameters()))
    torch_optimizer = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9, foreach=False)
    gathered: list[int] = []
    gather, at_once = FlatLayout.gather, FlatLayout.gather_at_once

    def noted(self: FlatLayout, grads: Any) -> None:
        gathered[-1] += 1
        gather(self, grads)

    def noted_at_once(self: FlatLayout, *args: Any) -> bool:
        done = at_once(self, *args)
        gathered[-1] += done
        return done

    equal = []
    with (
        mock.patch.object(FlatLayout, "gather", noted),
        mock.patch.object(FlatLayout, "gather_at_once", noted_at_once),
        mock.patch.object(bound_plans, "LEAST", 1),
    ):
        for iteration in range(ITERATIONS):
            torch.manual_seed(100 * rank + iteration)
            x = torch.randn(BATCH, WIDTH)
            for one in (mine, other):
                one.zero_grad(set_to_none=False)
                one(x, rank, iteration).square().sum().backward()
            gathered.append(0)
            bound.step()
            torch_optimizer.step()
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            equal.append(all(torch.equal(a, b) for a, b in pairs))
            if iteration == FOLLOWS - 1:
                bound.follow_gradients()
    storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
    return {"equal": equal, "gathered": gathered, "storages": len(storages)}
