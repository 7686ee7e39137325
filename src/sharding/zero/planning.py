"""From a ZeroRedundancyOptimizer's parameters to its plan, the same on all ranks."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.core.brief import brief
from functional_optim.core.initial import require_dtype
from functional_optim.core.stage import Kind, block_size_of
from sharding.planning import plan as make_plan
from sharding.problem import Assignment, Policy, Problem
from sharding.shard_plan import ShardPlan
from sharding.spec import ParameterSpec, Specs, kind_of
from sharding.transport.peers import GroupRank, named
from sharding.zero.collective import together
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.params import Groups, group_numbers, specs_of_groups

COMPARED = 4
"""How many different plans travel to all ranks, where ranks have made different ones."""


def planned(
    params: Mapping[str, Tensor],
    groups: Groups,
    recipes: GroupRecipes | None,
    policy: str | Policy,
    size: int,
    given: ShardPlan | None,
) -> ShardPlan:
    """The plan of these parameters, for a group of so many ranks.

    Raises:
        TypeError: a plan that is none.
        ValueError: a parameter of a dtype that the chain does not take; an override that is meant
            for no parameter; a plan for other parameters or another number of ranks, or one that
            cuts what cannot be cut.
    """
    if recipes is not None:
        recipes.unmet.check()
    check_dtypes(params, groups, recipes)
    specs = specs_of_groups(params, groups, kinds_of(recipes, groups))
    if given is None:
        arguments = _arguments(specs, recipes, groups, policy)
        return make_plan(specs, size, policy, **arguments)
    if not isinstance(given, ShardPlan):
        raise TypeError(f"plan must be a ShardPlan, got {brief(given)}")
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
    own = ShardPlan(size, specs_like(specs, given), given.pieces, given.policy, given.replicas)
    check_cuts(own, params, recipes)
    return own


def agreed(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], ShardPlan]
) -> ShardPlan:
    """Make a plan, and see to it that every rank of a group has made the same one. Collective.

    What travels is a digest; only where digests differ, a few of the different plans as JSON.

    Raises:
        ValueError: on every rank, with the differences between their parameters or plans.
        RuntimeError: another rank could not make one; names it, and says why.
        Exception: what ``make`` raises, on the rank where it does.
    """
    made: list[ShardPlan] = []

    def digest() -> str:
        made.append(make())
        return made[0].digest

    digests = together(group, device, "make a plan", digest)
    if len(set(digests)) == 1:
        return made[0]
    # One rank for each plan that there is, and of many plans the first ones.
    telling = sorted(map(digests.index, set(digests)))[:COMPARED]
    texts = together(
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
                f"order. {named(group, [GroupRank(rank)])} against group rank 0:\n{changes}"
            )
    return made[0]


def named_policy(policy: str | Policy) -> str | Policy:
    """A policy whose name is the same on every rank: that of a partial has an address in it."""
    if not isinstance(policy, functools.partial):
        return policy

    def with_options(problem: Problem, **options: Any) -> Assignment:
        found: Assignment = policy(problem, **options)
        return found

    functools.update_wrapper(with_options, policy)  # with its signature
    with_options.__name__ = getattr(policy.func, "__name__", "partial")
    return with_options


def specs_like(specs: Specs, given: ShardPlan) -> Specs:
    """Our specs (which know of groups and devices), with the kinds of a plan that was given."""
    return tuple(
        ParameterSpec(
            one.path, one.shape, one.dtype, one.device, one.requires_grad, other.kind, one.group
        )
        for one, other in zip(specs, given.specs, strict=True)
    )


def extended(
    plan: ShardPlan,
    params: Mapping[str, Tensor],
    groups: Groups,
    recipes: GroupRecipes | None,
    policy: str | Policy,
) -> ShardPlan:
    """A plan with more parameters, in which everything owned so far stays where it is."""
    check_dtypes(params, groups, recipes)
    known = {spec.path for spec in plan.specs}
    kinds = kinds_of(recipes, groups)
    specs = tuple(one for one in specs_of_groups(params, groups, kinds) if one.path not in known)
    arguments = _arguments(specs, recipes, groups, policy)
    # Replicas are extended within each, by the policy that the plan has there.
    made = plan.extended(specs, policy=None if plan.replicas > 1 else policy, **arguments)
    check_cuts(made, params, recipes)
    return made


def kinds_of(recipes: GroupRecipes | None, groups: Groups) -> list[Kind]:
    """Return, for each group, if its parameters may be cut."""
    if recipes is None:
        return ["per_matrix"] * len(groups)
    return [kind_of(recipes.of(number).optimizer) for number in range(len(groups))]


def _arguments(
    specs: Specs, recipes: GroupRecipes | None, groups: Groups, policy: str | Policy
) -> dict[str, Any]:
    """Return the policy's arguments besides the parameters."""
    if policy == "greedy" or recipes is None:
        return {}  # torch's partition counts elements only
    made: dict[int, Optimizer] = {}

    def stepper(spec: ParameterSpec) -> Optimizer:
        if spec.group not in made:
            device = spec.device.partition(" ")[0]
            made[spec.group] = recipes.of(spec.group).made(groups[spec.group], device)
        return made[spec.group]

    arguments: dict[str, Any] = {"optimizer": stepper}
    if (
        policy in ("elements", "sliced")
        and "pointwise" in kinds_of(recipes, groups)
        and any(one.kind == "per_matrix" for one in specs)
    ):
        # Some are needed whole, or have their elements in another order than their shape.
        arguments["mixed"] = True
    return arguments


def check_dtypes(
    params: Mapping[str, Tensor], groups: Groups, recipes: GroupRecipes | None
) -> None:
    """Every stage takes every parameter that is trained, whichever rank will own it.

    An owner would say so when it makes its state, while ranks that own others went on without it.

    Raises:
        ValueError: names the stage that does not, and the parameter.
    """
    if recipes is None:
        return
    numbers = group_numbers(groups)
    for path, param in params.items():
        if param.requires_grad:
            stages = recipes.of(numbers[id(param)]).optimizer.stages
            require_dtype(stages, param.dtype, f" for {path!r}")


def check_cuts(plan: ShardPlan, params: Mapping[str, Tensor], recipes: GroupRecipes | None) -> None:
    """A plan cuts only what can be cut.

    Raises:
        ValueError: names the parameter, and why it cannot be cut there.
    """
    if plan.is_whole:
        return
    for index, start, _, _ in plan.pieces.rows():
        if not start:
            continue
        path, group = plan.specs[index].path, plan.specs[index].group
        own = None if recipes is None else recipes.of(group).optimizer
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
