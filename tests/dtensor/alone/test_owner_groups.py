"""Test that a group that MatrixOwnerOptimizer refuses leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from functional_optim import adamw, labels, matching, muon, partition
from sharding import POLICIES, MatrixOwnerOptimizer
from tests.dtensor.jobs import mesh

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_a_group_that_the_policy_refuses_leaves_no_options() -> None:
    """The next group gets the number of the refused one, but keeps its own options."""
    models = nn.Linear(4, 3), nn.Linear(3, 2)
    for one in models:
        fully_shard(one, mesh=mesh())
    asked: list[int] = []

    def policy(problem: Any) -> Any:
        asked.append(len(problem.numels))
        if len(asked) == 2:
            raise ValueError("no owner is left")
        return POLICIES["two_resource"](problem)

    chosen = partition(
        {"matrix": muon(lr=0.1), "rest": adamw(lr=0.1)},
        labels({"rest": matching("*bias")}, default="matrix"),
    )
    optimizer = MatrixOwnerOptimizer(models[0].named_parameters(), chosen, policy=policy)
    weight, bias = models[1].parameters()
    with pytest.raises(ValueError, match="no owner is left"):
        optimizer.add_param_group({"params": [("more.weight", weight)]})
    assert len(optimizer.param_groups) == 2 and weight not in optimizer.state
    optimizer.add_param_group({"params": [("more.bias", bias)]})
    models[1](models[0](torch.ones(2, 4))).sum().backward()
    before = bias.detach().clone()
    optimizer.step()
    assert not torch.equal(before.full_tensor(), bias.detach().full_tensor())  # type: ignore[attr-defined]
