"""Tests of ``ZeroRedundancyOptimizer.state``, the state of one rank by parameter."""

from typing import Any

import pytest
import torch

from functional_optim import adamw
from sharding import ParameterSpec, ShardPlan, ZeroRedundancyOptimizer
from sharding.pieces import pieces_of
from sharding.transport.local import LocalWorld


def made(group: Any) -> tuple[dict[str, torch.nn.Parameter], ZeroRedundancyOptimizer]:
    """Return parameters and an optimizer after a step.

    Rank 0 owns a, a part of b, and two ranges of c. Rank 2 owns nothing.
    """
    params = {name: torch.nn.Parameter(torch.arange(6.0)) for name in "abc"}
    specs = tuple(ParameterSpec(name, (6,)) for name in params)
    rows = [(0, 0, 6, 0), (1, 0, 2, 0), (1, 2, 6, 1), (2, 0, 1, 0), (2, 1, 3, 1), (2, 3, 6, 0)]
    plan = ShardPlan(3, specs, pieces_of(rows), "own")
    zero = ZeroRedundancyOptimizer(params.items(), adamw(0.1), group, plan=plan)
    for param in params.values():
        param.grad = torch.arange(6.0) + 1.0
    zero.step()
    return params, zero


def test_every_parameter_has_an_entry_of_what_the_rank_owns() -> None:
    """Fault 10: ``state`` was empty on all ranks, even on ranks that owned elements."""
    average = torch.zeros(6).lerp(torch.arange(6.0) + 1.0, 0.1)
    wanted = [
        {"a": average, "b": average[:2], "c": average[[0, 3, 4, 5]]},
        {"b": average[2:], "c": average[1:3]},
        {},
    ]

    def looked_at(group: Any) -> None:
        params, zero = made(group)
        assert list(zero.state) == list(params.values()) and len(zero.state) == 3
        own = wanted[group.rank()]
        for name, param in params.items():
            entries = zero.state[param]
            assert bool(entries) == (name in own)
            assert not entries or torch.equal(entries["exp_avg"], own[name])
            assert not entries or entries["step"] == 1
        assert zero.state is zero.state and params["a"] in zero.state
        with pytest.raises(KeyError, match=r"does not have the parameter a tensor of shape \(9,\)"):
            zero.state[torch.ones(9)]
        new = torch.nn.Parameter(torch.ones(2))
        zero.add_param_group({"params": [("new", new)]})
        assert list(zero.state) == [*params.values(), new]

    LocalWorld(3).run(looked_at)


def test_what_is_written_is_of_what_the_rank_owns() -> None:
    """State entries can be written in place, or replaced by a tensor, which is copied."""

    def written(group: Any) -> None:
        params, zero = made(group)
        if group.rank() == 0:
            zero.state[params["b"]]["exp_avg"].fill_(3.0)
            zero.state[params["a"]] = {**zero.state[params["a"]], "exp_avg": torch.full((6,), 2.0)}
            for param, entries in zero.state.items():
                if param is not params["c"]:
                    zero.state[param] = entries
        else:
            zero.state[params["a"]] = {}
        what = "owns 2 ranges" if group.rank() == 0 else "owns (0|1) ranges"
        if group.rank() != 1:
            with pytest.raises(ValueError, match=f"state of 'c' .* {what}"):
                zero.state[params["c"]] = {"step": torch.tensor(1.0)}
        with pytest.raises(TypeError, match="cannot be deleted"):
            del zero.state[params["a"]]
        with pytest.raises(AttributeError, match=r"cannot be replaced.*call load_state_dict\(\)"):
            zero.state = {}
        for param in params.values():
            param.grad = torch.zeros(6)
        zero.step()
        if group.rank() == 0:
            for name, value in (("a", 2.0), ("b", 3.0)):
                found = zero.state[params[name]]["exp_avg"]
                assert torch.equal(found, torch.full_like(found, value).lerp(torch.zeros(()), 0.1))

    LocalWorld(3).run(written)
