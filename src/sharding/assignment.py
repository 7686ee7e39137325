"""Assignment of parameters to ranks by a policy, for new plans and for extended plans."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from functional_optim.engine.messages import format_value
from functional_optim.engine.stages import block_size_of
from sharding.cost import ByteCost, Cost, ElementCost, StepCost, costs_of
from sharding.optimizer_costs import OptimizerOrFactory, optimizers_of
from sharding.pieces import NO_PIECES, Pieces
from sharding.policies import POLICIES, REMOVED, hierarchical, removed, two_resource
from sharding.problem import Assignment, Policy, Problem
from sharding.spec import Specs, kind_of
from sharding.units import pieces_of_parameters, pieces_of_units, units_of


def find_policy(policy: str | Policy) -> tuple[str, Policy]:
    """Return the name of a policy, and the policy."""
    if isinstance(policy, str):
        if policy in REMOVED:
            raise ValueError(removed(policy))
        if policy not in POLICIES:
            raise ValueError(
                f"policy must be one of {', '.join(POLICIES)}, got {format_value(policy)}"
            )
        return policy, POLICIES[policy]
    if not callable(policy):
        raise TypeError(
            f"policy must be a name or a function of a Problem, got {format_value(policy)}"
        )
    return _name_of(policy), policy


def _name_of(policy: Any) -> str:
    """Return the name of the policy in a partial or wrapped function: the same on all ranks."""
    inner = getattr(policy, "func", getattr(policy, "__wrapped__", None))
    return str(getattr(policy, "__name__", policy)) if inner is None else _name_of(inner)


def cost_model(optimizer: OptimizerOrFactory | None, cost: Cost | None, *, has_time: bool) -> Cost:
    """Return the cost model: the caller's, else that of the optimizer, else elements."""
    if cost is not None:
        if not callable(cost):
            raise TypeError(
                f"cost must be a function from specs to Weights, got {format_value(cost)}"
            )
        return cost
    if optimizer is None:
        return ElementCost()
    return StepCost(optimizer) if has_time else ByteCost(optimizer)


def _has_time(policy: Any, options: Mapping[str, Any]) -> bool:
    """Return True for ``two_resource``, also as a partial function or within nodes."""
    while policy is not two_resource:
        options = {**getattr(policy, "keywords", {}), **options}
        inner = getattr(policy, "func", getattr(policy, "__wrapped__", None))
        if inner is None:
            return policy is hierarchical and options.get("within") == "two_resource"
        policy = inner
    return True


def assign(
    specs: Specs,
    ranks: int,
    policy: Policy,
    optimizer: OptimizerOrFactory | None,
    cost: Cost | None,
    options: Mapping[str, Any],
    owned: Pieces = NO_PIECES,
) -> Assignment:
    """Run a policy, and check that the optimizers allow its cuts.

    Args:
        specs: of all parameters; those with owners come first.
        ranks: number of ranks.
        policy, options: assign the remaining parameters.
        optimizer: of the parameters.
        cost: cost model; None for that of the optimizer and the policy.
        owned: the pieces of the parameters with owners.

    Returns:
        The pieces of the parameters without owners, numbered from 0.
    """
    units = units_of(specs)
    model = cost_model(optimizer, cost, has_time=_has_time(policy, options))
    costs = costs_of(model, units.specs)
    own = pieces_of_units(owned, units)
    sizes, times = (
        own.sum_by_rank(weights.of(own.parameter, own.lengths), ranks)
        for weights in (costs.bytes, costs.time)
    )
    new = units.after(owned.parameter[-1] + 1 if len(owned) else 0)
    first = len(units.specs) - len(new.specs)
    optimizers = [] if optimizer is None else optimizers_of(new.specs, optimizer)
    distinct = {id(one): one for one in optimizers}
    allowed = {key: (block_size_of(one.stages), kind_of(one)) for key, one in distinct.items()}
    problem = Problem(
        new.specs,
        tuple(spec.numel for spec in new.specs),
        costs.bytes.after(first),
        costs.time.after(first),
        ranks,
        sizes,
        times,
        own.sum_by_rank(own.lengths, ranks),
        math.lcm(*(block for block, kind in allowed.values() if kind == "pointwise")),
    )
    _check_options(policy, problem, options)
    found = policy(problem, **options)
    if not isinstance(found, Assignment):
        raise TypeError(f"a policy returns an Assignment, got {format_value(found)}")
    if optimizers:
        _check_cuts(new.specs, found.pieces, [allowed[id(one)] for one in optimizers])
    return replace(found, pieces=pieces_of_parameters(found.pieces, new))


def _check_options(policy: Policy, problem: Problem, options: Mapping[str, Any]) -> None:
    """Raise TypeError if the policy does not have an option, or needs another one."""
    try:
        signature = inspect.signature(policy)
    except ValueError:  # written in C
        return
    try:
        signature.bind(problem, **options)
    except TypeError as error:
        name = _name_of(policy)
        raise TypeError(
            f"the policy {name!r}: {error}; options are arguments of plan(), and elsewhere go into "
            f"policy=functools.partial(sharding.POLICIES[{name!r}], ...)"
        ) from error


def _check_cuts(specs: Specs, pieces: Pieces, allowed: Sequence[tuple[int, str]]) -> None:
    for index, start, _, _ in pieces.rows():
        if not start:
            continue
        block, kind = allowed[index]
        if kind == "per_matrix":
            raise ValueError(
                f"{specs[index].path!r} is cut at element {start}, but its optimizer has a "
                "per_matrix stage, which needs it whole; give its spec kind='per_matrix' "
                "(with the policy 'elements' and its option mixed=True), or take the policy "
                "'largest_first'"
            )
        if start % block:
            raise ValueError(
                f"{specs[index].path!r} is cut at element {start}, but its optimizer allows cuts "
                f"at multiples of {block} elements only; give align={block}"
            )
