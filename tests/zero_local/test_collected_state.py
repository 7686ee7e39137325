"""Collected state is of the steps before, and of no other state."""

from typing import Any

import torch
import torch.distributed as dist

from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld


def zero_of(group: dist.ProcessGroup) -> ZeroRedundancyOptimizer:
    """Return an optimizer of one parameter, which rank 0 owns."""
    weight = torch.nn.Parameter(torch.ones(4))
    return ZeroRedundancyOptimizer([("w", weight)], torch.optim.Adam, lr=0.1, process_group=group)


def iterate(zero: ZeroRedundancyOptimizer) -> None:
    """Make the calls of a hook, on a rank that owns nothing too."""
    if zero.owned:
        zero.step_owned({"w": [(0, 4, torch.ones(4))]})
    zero.mark_stepped()


def test_an_iteration_drops_it_on_every_rank() -> None:
    def trained(group: dist.ProcessGroup) -> Any:
        zero = zero_of(group)
        iterate(zero)
        zero.consolidate_state_dict(to=1)
        iterate(zero)
        (entries,) = zero.state_dict()["state"].values()
        return {key: value.current for key, value in entries.items()}

    owner, other = LocalWorld(2).run(trained)
    assert owner["step"][0].tolist() == [2.0]
    assert other == {}


def test_a_load_drops_it() -> None:
    def loaded(group: dist.ProcessGroup) -> Any:
        zero, source = zero_of(group), zero_of(group)
        iterate(zero)
        for _ in range(3):
            iterate(source)
        source.param_groups[0]["lr"] = 0.5
        for rank in range(2):
            source.consolidate_state_dict(to=rank)
            if group.rank() == rank:
                given = source.state_dict()
        zero.consolidate_state_dict(to=0)
        zero.load_state_dict(given)
        found = zero.state_dict()
        (entries,) = found["state"].values()
        return found["param_groups"][0]["lr"], {k: v.current for k, v in entries.items()}

    (lr, owner), (other_lr, other) = LocalWorld(2).run(loaded)
    assert lr == other_lr == 0.5
    assert owner["step"][0].tolist() == [3.0]
    assert other == {}
