"""Tests on two ranks of a group that is added after some steps."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from functional_optim import TorchOptimizer, schedule_free_adamw
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests import checkpoints
from tests.composition.trees import grads_at

from .compare import difference
from .test_between_steps import CHAINS, Make, named, saved_of, values, zero_of


@pytest.mark.parametrize("source", ["state dict", "checkpoint"])
@pytest.mark.parametrize("name", CHAINS)
def test_what_is_saved_after_a_group_was_added_is_loaded(
    name: str, source: str, tmp_path: Path
) -> None:
    """Fault 11: state that was saved right after a group was added could not be loaded.

    The new group had no shared scalars before its first step.
    """

    def trains(make: Make) -> dict[str, Tensor]:
        params = named()
        pairs = list(params.items())

        one = make(pairs[:3])
        for step in range(6):
            if step == 3:
                for group in one.param_groups:
                    group["lr"] = 0.05
                one.add_param_group({"params": pairs[3:], "lr": 0.05})
                if isinstance(one, ZeroRedundancyOptimizer):
                    saved, two = saved_of(one), make(pairs[:3])
                    two.add_param_group({"params": pairs[3:]})
                    checkpoints.save(one, tmp_path)
                    if source == "checkpoint":
                        checkpoints.load(two, tmp_path)
                    else:
                        two.load_state_dict(saved)
                    one = two
                assert all(group["lr"] == 0.05 for group in one.param_groups)
            for path, grad in grads_at(step).items():
                params[path].grad = grad
            one.step()
        return values(params)

    wanted = trains(lambda params: TorchOptimizer(params, CHAINS[name]()))
    for found in LocalWorld(2).run(lambda group: trains(zero_of(CHAINS[name], group, "greedy"))):
        assert difference(found, wanted) == []


def test_a_group_that_differs_in_what_shared_scalars_depend_on_is_refused() -> None:
    """Every rank refuses a group whose lr differs from the current lr of the other groups.

    The shared scalars of Schedule-Free depend on lr. TorchOptimizer refuses such a group, too.
    """

    def trains(group: Any) -> list[Any]:
        pairs = list(named().items())
        zero = ZeroRedundancyOptimizer(pairs[:3], schedule_free_adamw(lr=0.01), group)
        for number, (path, param) in enumerate(pairs[:3]):
            param.grad = grads_at(number)[path]
        zero.step()
        zero.param_groups[0]["lr"] = 0.02
        with pytest.raises(ValueError, match="so lr must be the same") as error:
            zero.add_param_group({"params": pairs[3:]})
        assert len(zero.param_groups) == 1 and set(zero.params) == {path for path, _ in pairs[:3]}
        zero.add_param_group({"params": pairs[3:], "lr": 0.02})
        for path, param in pairs:
            param.grad = grads_at(4)[path]
        zero.step()
        return [str(error.value), len(zero.param_groups)]

    for found in LocalWorld(2).run(trains):
        assert found[1] == 2
