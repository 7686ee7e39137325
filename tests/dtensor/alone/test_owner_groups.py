"""Groups and state dicts that MatrixOwnerOptimizer refuses leave nothing behind."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from functional_optim import TorchOptimizer, adamw, labels, matching, muon, partition
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


def test_a_checkpoint_whose_loading_would_lose_state_changes_nothing() -> None:
    """State for a number in no group was dropped; a number listed twice was a KeyError."""
    chosen = partition(
        {"matrix": muon(lr=0.1), "rest": adamw(lr=0.1)},
        labels({"rest": matching("*bias")}, default="matrix"),
    )
    plain, model = nn.Linear(4, 3), nn.Linear(4, 3)
    other = TorchOptimizer(plain.named_parameters(), chosen)
    plain(torch.ones(2, 4)).sum().backward()
    other.step()
    saved = other.state_dict()
    fully_shard(model, mesh=mesh())
    optimizer = MatrixOwnerOptimizer(model.named_parameters(), chosen)
    before = repr(optimizer.state_dict())
    twice, unknown = copy.deepcopy(saved), copy.deepcopy(saved)
    twice["param_groups"][1]["params"] = list(twice["param_groups"][0]["params"])
    unknown["state"][9] = unknown["state"][0]
    for wrong, told in ((twice, "number 0 twice, .* of group 0 and .* of group 1"), (unknown, "9")):
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(wrong)
        assert repr(optimizer.state_dict()) == before
    optimizer.load_state_dict(saved)
    steps = [int(entries["step"]) for entries in optimizer.state.values()]
    assert steps == [1, 1]
