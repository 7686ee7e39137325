"""Tests on threads of state that is collected for torch.optim."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from functional_optim import sgd
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup

from .towers import give, raised, tower


def test_what_was_never_stepped_is_consolidated_as_torch_has_it() -> None:
    """A parameter that was never stepped gets no momentum buffer in the collected state.

    torch's SGD would take a buffer of zeros for momentum, and dampen the first gradient.
    """
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}

    def law(group: LocalGroup) -> None:
        ours, theirs = ([nn.Parameter(torch.ones(2)) for _ in range(2)] for _ in range(2))
        zero = ZeroRedundancyOptimizer(ours, sgd(**options), group)
        other = torch.optim.SGD(theirs, **options)
        ours[0].grad = theirs[0].grad = torch.ones(2)
        zero.step()
        zero.consolidate_state_dict()
        found = copy.deepcopy(zero.state_dict())
        other.step()
        again = torch.optim.SGD([one.detach().clone().requires_grad_() for one in theirs])
        again.load_state_dict(found)
        for optimizer in (other, again):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones(2)
            optimizer.step()
        pairs = zip(theirs, again.param_groups[0]["params"], strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)

    LocalWorld(1).run(law)


def test_save_names_what_has_replaced_it(tmp_path: Path) -> None:
    """``save`` names its replacement on every rank, before anything is written."""

    def law(group: LocalGroup) -> str:
        return raised(tower("adam", group)[1].save, tmp_path / "saved")

    for told in LocalWorld(2).run(law):
        assert told.startswith("RuntimeError: ZeroRedundancyOptimizer.save() is gone")
        assert "torch.distributed.checkpoint.save(" in told and "get_optimizer_state_dict" in told
    assert list(tmp_path.iterdir()) == []


def test_a_rate_that_a_scheduler_has_set_is_collected() -> None:
    """A collected learning rate is the one that a scheduler set after the last step."""

    def law(group: LocalGroup) -> None:
        _, zero = tower("adam", group)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, 0.5)
        give(zero, 0)
        zero.step()
        scheduler.step()
        rates = [one["lr"] for one in zero.param_groups]
        zero.consolidate_state_dict(to=0)
        assert [one["lr"] for one in zero.param_groups] == rates == [0.005, 0.015]
        assert group.rank() or [one["lr"] for one in zero.state_dict()["param_groups"]] == rates

    LocalWorld(2).run(law)
