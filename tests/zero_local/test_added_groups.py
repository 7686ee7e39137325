"""Tests on two ranks of a group that is added after some steps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import TorchOptimizer, adamw, muon, partition, schedule_free_adamw
from sharding import Assignment, ZeroRedundancyOptimizer, hierarchical
from sharding.problem import Policy, Problem
from sharding.transport.local import LocalWorld
from tests import checkpoints
from tests.composition.trees import grads_at, kind

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
                owned = getattr(one, "owned", [])
                one.add_param_group({"params": pairs[3:], "lr": 0.05})
                if isinstance(one, ZeroRedundancyOptimizer):
                    assert one.owned[: len(owned)] == owned  # an added group moves no range
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


def _by_function(problem: Problem) -> Assignment:
    return hierarchical(problem, node_size=2, within="elements", align=64)


@pytest.mark.parametrize(
    "policy", [partial(hierarchical, node_size=2, within="elements", align=64), _by_function]
)
def test_a_replicated_plan_cuts_added_parameters_by_the_options_of_its_policy(
    policy: Policy,
) -> None:
    """Added parameters were cut by the policy within a replica, without the caller's options."""

    def trains(group: Any) -> list[list[tuple[int, int, tuple[int, ...]]]]:
        params = [(name, nn.Parameter(torch.ones(500))) for name in ("first", "added")]
        zero = ZeroRedundancyOptimizer(params[:1], adamw(lr=0.1), group, policy=policy)
        zero.add_param_group({"params": params[1:]})
        for _, param in params:
            param.grad = torch.ones(500)
        zero.step()
        assert torch.equal(params[0][1], params[1][1])
        owners = [zero.plan.owners(path) for path, _ in params]
        return [[(one.start, one.stop, one.ranks) for one in own] for own in owners]

    for first, added in LocalWorld(4).run(trains):
        for pieces in (first, added):
            assert [start % 64 for start, _, _ in pieces] == [0, 0]
            assert {ranks for _, _, ranks in pieces} == {(0, 2), (1, 3)}


def test_a_replicated_plan_keeps_added_matrices_whole_if_its_policy_does() -> None:
    """Without its option ``mixed``, the policy cut a parameter that a rule needs whole."""
    policy = partial(hierarchical, node_size=2, within="elements", mixed=True)
    optimizer = partition({"matrices": muon(0.1), "rest": adamw(0.1)}, kind)

    def owners_of_added(group: Any) -> list[int]:
        params = list(named().items())
        zero = ZeroRedundancyOptimizer(params[:1], optimizer, group, policy=policy)
        zero.add_param_group({"params": params[1:]})
        return [len(zero.plan.owners(path)) for path, param in params if param.dim() == 2]

    for found in LocalWorld(4).run(owners_of_added):
        assert found
        assert set(found) == {1}


def test_a_replicated_plan_is_extended_by_the_named_policy() -> None:
    """The name was ignored: added parameters were assigned by the policy of the plan."""

    def pieces_of_added(group: Any, policy: str) -> int:
        sizes = {"first": 64, "added": 500}
        params = [(name, nn.Parameter(torch.ones(size))) for name, size in sizes.items()]
        nodes = partial(hierarchical, node_size=2, within="largest_first")
        given = ZeroRedundancyOptimizer(params[:1], adamw(0.1), group, policy=nodes).plan
        zero = ZeroRedundancyOptimizer(params[:1], adamw(0.1), group, plan=given, policy=policy)
        zero.add_param_group({"params": params[1:]})
        return len(zero.plan.owners("added"))

    for policy, wanted in (("elements", 2), ("largest_first", 1), ("sliced", 2)):
        found = LocalWorld(4).run(lambda group: pieces_of_added(group, policy))  # noqa: B023
        assert found == [wanted] * 4, policy


def test_a_policy_that_makes_other_replicas_than_the_plan_is_refused() -> None:
    """A plan of 2 replicas of 2 ranks is not extended by a policy for nodes of 4 ranks."""

    def refused(group: Any) -> str:
        params = list(named().items())
        first = ZeroRedundancyOptimizer(
            params[:2], adamw(0.1), group, policy=partial(hierarchical, node_size=2)
        )
        zero = ZeroRedundancyOptimizer(
            params[:2],
            adamw(0.1),
            group,
            plan=first.plan,
            policy=partial(hierarchical, node_size=4),
        )
        with pytest.raises((ValueError, RuntimeError)) as error:
            zero.add_param_group({"params": params[2:]})
        assert len(zero.param_groups) == 1
        return str(error.value)

    for text in LocalWorld(4).run(refused):
        assert "node_size must divide the number of ranks, 2, got 4" in text
