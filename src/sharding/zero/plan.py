"""Shard plan of a ZeroRedundancyOptimizer, the same on all ranks."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.engine.groups import GroupChains
from functional_optim.engine.messages import format_value
from functional_optim.engine.stages import Kind, block_size_of
from functional_optim.engine.states import check_dtype
from sharding.problem import Assignment, Policy, Problem
from sharding.shard_plan import ShardPlan
from sharding.shard_plan import plan as make_plan
from sharding.spec import ParameterSpec, Specs, kind_of
from sharding.transport.groups import GroupRank, format_ranks
from sharding.zero.collective import run_on_all_ranks
from sharding.zero.params import Groups, group_numbers, specs_of_groups

COMPARED = 4
"""Maximum number of different plans that are sent to all ranks for an error message."""


def build_plan(
    params: Mapping[str, Tensor],
    groups: Groups,
    chains: GroupChains | None,
    policy: str | Policy,
    size: int,
    given: ShardPlan | None,
) -> ShardPlan:
    """Return the plan of parameters for a number of ranks.

    Raises:
        TypeError: ``given`` is no plan.
        ValueError: a parameter of a dtype that the chain does not take; an override that selects
            no parameter; a plan for other parameters or another number of ranks, or one that cuts
            parameters that cannot be cut.
    """
    if chains is not None and chains.divides:
        chains.selectors.check()
    check_dtypes(params, groups, chains)
    specs = specs_of_groups(params, groups, group_kinds(chains, groups))
    if given is None:
        return make_plan(specs, size, policy, **_policy_options(specs, chains, groups, policy))
    if not isinstance(given, ShardPlan):
        raise TypeError(f"plan must be a ShardPlan, got {format_value(given)}")
    if given.world_size != size:
        raise ValueError(
            f"the plan is for {given.world_size} ranks, the process group has {size}; make one for "
            "this group"
        )
    given.check(params)
    divided = next((one for one in given.specs if one.blocks is not None), None)
    if divided is not None:
        raise ValueError(
            f"{divided.path!r} has {divided.blocks} in the plan, and ZeroRedundancyOptimizer steps "
            "whole parameters; make the plan without blocks, and give the blocks as options of the "
            "rule, such as muon(row_blocks=12)"
        )
    # The specs of this optimizer have groups and devices, the given plan has the kinds.
    kinds = [one.kind for one in given.specs]
    specs = tuple(replace(one, kind=kind) for one, kind in zip(specs, kinds, strict=True))
    own = ShardPlan(size, specs, given.pieces, given.policy, given.replicas)
    check_cuts(own, params, chains)
    return own


def agree_on_plan(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], ShardPlan]
) -> ShardPlan:
    """Make a plan, and make sure that every rank of a group made the same plan. Collective.

    Ranks exchange digests. If digests differ, a few of the plans are sent as JSON.

    Raises:
        ValueError: on every rank, with the differences between their parameters or plans.
        RuntimeError: another rank could not make a plan; names the rank, and its error.
        Exception: what ``make`` raises, on the rank where it fails.
    """
    made: list[ShardPlan] = []

    def digest() -> str:
        made.append(make())
        return made[0].digest

    digests = run_on_all_ranks(group, device, "make a plan", digest)
    if len(set(digests)) == 1:
        return made[0]
    # One rank for each different plan, up to a maximum number.
    telling = sorted(map(digests.index, set(digests)))[:COMPARED]
    texts = run_on_all_ranks(
        group,
        device,
        "compare plans",
        lambda: made[0].to_json() if group.rank() in telling else None,
    )
    first, *others = [(rank, ShardPlan.from_json(texts[rank])) for rank in telling]
    for rank, other in others:
        changes = first[1].diff(other)
        if changes:
            raise ValueError(
                "the ranks have different parameters or plans; all must be the same, in the same "
                f"order. {format_ranks(group, [GroupRank(rank)])} against group rank 0:\n{changes}"
            )
    return made[0]


def extend_plan(
    plan: ShardPlan,
    params: Mapping[str, Tensor],
    groups: Groups,
    chains: GroupChains | None,
    policy: str | Policy,
) -> ShardPlan:
    """Return a plan with more parameters, in which all known parameters keep their owners."""
    check_dtypes(params, groups, chains)
    known = {spec.path for spec in plan.specs}
    kinds = group_kinds(chains, groups)
    specs = tuple(one for one in specs_of_groups(params, groups, kinds) if one.path not in known)
    options = _policy_options(specs, chains, groups, policy)
    return plan.extended(specs, policy=_policy_within(plan, policy), **options)


def _policy_within(plan: ShardPlan, policy: str | Policy) -> str | Policy:
    """Return the policy for the ranks of one replica.

    A function that makes the replicas of the plan also decides within them, by its own options.
    """
    if plan.replicas == 1 or isinstance(policy, str):
        return policy

    def within_replica(problem: Problem, **options: Any) -> Assignment:
        world = replace(
            problem,
            ranks=plan.world_size,
            loads=problem.loads * plan.replicas,
            time_loads=problem.time_loads * plan.replicas,
            elements=problem.elements * plan.replicas,
        )
        found = policy(world, **options)
        if found.replicas == plan.replicas:
            return Assignment(found.pieces)
        return policy(problem, **options)

    return functools.update_wrapper(within_replica, policy)  # the options and cost of the policy


def group_kinds(chains: GroupChains | None, groups: Groups) -> list[Kind]:
    """Return the kind of each group: "pointwise" if its parameters may be cut."""
    if chains is None:
        return ["per_matrix"] * len(groups)
    return [kind_of(chains.parts[number].optimizer) for number in range(len(groups))]


def _policy_options(
    specs: Specs, chains: GroupChains | None, groups: Groups, policy: str | Policy
) -> dict[str, Any]:
    """Return the arguments of a policy besides the parameters."""
    if policy == "greedy" or chains is None:
        return {}  # torch's partition only counts elements
    made: dict[int, Optimizer] = {}

    def stepper(spec: ParameterSpec) -> Optimizer:
        if spec.group not in made:
            made[spec.group] = chains.reader(spec.group).chain(groups[spec.group]).optimizer
        return made[spec.group]

    options: dict[str, Any] = {"optimizer": stepper}
    if (
        policy in ("elements", "sliced")
        and "pointwise" in group_kinds(chains, groups)
        and any(one.kind == "per_matrix" for one in specs)
    ):
        # Some parameters are not cut: their rule needs them whole, or they are not contiguous.
        options["mixed"] = True
    return options


def check_dtypes(params: Mapping[str, Tensor], groups: Groups, chains: GroupChains | None) -> None:
    """Make sure that all stages take the dtypes of all trained parameters, on every rank.

    Otherwise only the owner would raise an error, when it creates the state.

    Raises:
        ValueError: names the stage and the parameter.
    """
    if chains is None:
        return
    numbers = group_numbers(groups)
    for path, param in params.items():
        if param.requires_grad:
            stages = chains.parts[numbers[id(param)]].optimizer.stages
            check_dtype(stages, param.dtype, f" for {path!r}")


def check_cuts(plan: ShardPlan, params: Mapping[str, Tensor], chains: GroupChains | None) -> None:
    """Make sure that a plan cuts only parameters that can be cut.

    Raises:
        ValueError: names the parameter, and the reason.
    """
    if plan.is_whole:
        return
    for index, start, _, _ in plan.pieces.rows():
        if not start:
            continue
        path, group = plan.specs[index].path, plan.specs[index].group
        own = None if chains is None else chains.parts[group].optimizer
        block = 1 if own is None else block_size_of(own.stages)
        if own is None or kind_of(own) == "per_matrix":
            raise ValueError(
                f"the plan cuts {path!r} at element {start}, but the optimizer needs parameters "
                "whole; take a policy that leaves them whole, such as 'largest_first'"
            )
        if not params[path].is_contiguous():
            raise ValueError(
                f"the plan cuts {path!r} at element {start}, but its elements do not lie in the "
                f"order of its shape (strides {params[path].stride()}); keep it whole"
            )
        if start % block:
            raise ValueError(
                f"the plan cuts {path!r} at element {start}, but the optimizer keeps state in "
                f"blocks of {block} elements; cut at multiples of that (align={block})"
            )
