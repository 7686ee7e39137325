"""Tests with one rank of flags and misspelt options in parameter groups."""

from typing import Any

import pytest
import torch

from functional_optim import adamw, if_any
from sharding import ZeroRedundancyOptimizer
from tests.choices import case

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_a_state_dict_older_than_maximize() -> None:
    """Fault 24: a flag that the loaded state dict lacks is off, as in torch.optim."""
    param = torch.nn.Parameter(torch.ones(2))
    old = torch.optim.AdamW([param]).state_dict()
    del old["param_groups"][0]["maximize"]
    kinds: list[Any] = [torch.optim.AdamW, adamw]
    for kind in kinds:
        with case(kind=kind):
            zero = ZeroRedundancyOptimizer([param], kind, maximize=True)
            zero.load_state_dict(old)
            assert zero.param_groups[0]["maximize"] is False
            param.grad = torch.ones(2)
            before = param.detach().clone()
            zero.step()
            assert bool((param < before).all())


def test_a_misspelt_option_of_a_group_is_refused() -> None:
    """Fault 30: the constructor and add_param_group refuse a misspelt option."""
    param, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    kinds: list[Any] = [torch.optim.AdamW, adamw, adamw().override(if_any(("a",)), lr=0.5)]
    for kind in kinds:
        with case(kind=kind):
            with pytest.raises(TypeError, match="did you mean 'weight_decay'"):
                ZeroRedundancyOptimizer([{"params": [param], "wd": 0.1}], kind)
            zero = ZeroRedundancyOptimizer([{"params": [param], "initial_lr": 0.1}], kind)
            with pytest.raises(TypeError, match="did you mean 'weight_decay'"):
                zero.add_param_group({"params": [other], "wd": 0.1})
            assert len(zero.param_groups) == 1
