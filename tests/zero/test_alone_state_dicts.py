"""Tests of state dicts on one rank."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from sharding import ZeroRedundancyOptimizer
from tests.zero_local.compare import difference

from .alone import params, step

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_state_dict_hooks_and_errors(tmp_path: Path) -> None:
    zero = ZeroRedundancyOptimizer(params(), torch.optim.Adam)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        torch.save(zero.state_dict(), tmp_path / "part")
    with pytest.raises(ValueError, match="0 to 0, got 1"):
        zero.consolidate_state_dict(to=1)
    step(zero)
    zero.consolidate_state_dict()
    seen: list[Any] = []
    zero.register_state_dict_post_hook(lambda _, found: seen.append(sorted(found["state"])))
    zero.register_load_state_dict_pre_hook(lambda _, found: seen.append(len(found["state"])))
    zero.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    found = zero.state_dict()
    zero.load_state_dict(found)
    assert seen == [[0, 1], 2, "loaded"]
    kept = copy.deepcopy(found)
    step(zero)
    assert difference(found, kept) == []  # the state dict shares no memory with the optimizer


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found["param_groups"].pop(), "groups of"),
        (lambda found: found["param_groups"][0]["params"].pop(), "groups of"),
        (lambda found: found["state"].update({9: {}}), "parameter number 9"),
        (lambda found: found["state"].update(note={}), "under .note., .*; remove it"),
        (lambda found: found["state"][1].pop("exp_avg"), "does not fit"),
        (lambda found: found["state"].update({1: {"step": 3}}), "stepped 3 times, .* no exp_avg,"),
        (lambda found: found["state"][1].update(exp_avg=torch.ones(5)), "another tree"),
        (lambda found: found["param_groups"][0].update(lr=-1.0), "lr"),
    ],
)
def test_state_dicts_that_are_refused(change: Any, told: str) -> None:
    zero = ZeroRedundancyOptimizer(
        [{"params": params()}, {"params": params(), "lr": 0.5}], torch.optim.Adam
    )
    step(zero)
    zero.consolidate_state_dict()
    found = copy.deepcopy(zero.state_dict())
    before = copy.deepcopy(found)
    change(found)
    with pytest.raises(ValueError, match=told):
        zero.load_state_dict(found)
    zero.consolidate_state_dict()
    assert difference(zero.state_dict(), before) == []


def test_options_that_need_other_state_are_loaded_with_it() -> None:
    one, two = params(), params()
    other = torch.optim.Adam(two, lr=0.5, amsgrad=True, foreach=False)
    zero = ZeroRedundancyOptimizer(one, torch.optim.Adam)
    step(other)
    for ours, theirs in zip(one, two, strict=True):
        ours.data.copy_(theirs.detach())
    zero.load_state_dict(other.state_dict())
    step(other, 0.1)
    step(zero, 0.1)
    assert all(map(torch.equal, one, two))
    assert zero.param_groups[0]["amsgrad"] is True
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        ZeroRedundancyOptimizer(params(), torch.optim.AdamW).load_state_dict(other.state_dict())
