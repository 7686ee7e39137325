"""From specs and a policy to pieces: the common part of making a plan and of extending one."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.core.brief import brief
from functional_optim.core.stage import block_size_of
from sharding.cost import ByteCost, Cost, ElementCost
from sharding.footprint import Stepper, optimizers_of
from sharding.pieces import Pieces
from sharding.policies import POLICIES
from sharding.problem import Assignment, Policy, Problem
from sharding.spec import Specs, kind_of

PolicyName = str
"""A key of :data:`sharding.POLICIES`."""


def policy_named(policy: PolicyName | Policy) -> tuple[str, Policy]:
    """The name of a policy, and the policy.

    Raises:
        TypeError: neither a name nor a function.
        ValueError: an unknown name.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {brief(policy)}")
        return policy, POLICIES[policy]
    if not callable(policy):
        raise TypeError(f"policy must be a name or a function of a Problem, got {brief(policy)}")
    return str(getattr(policy, "__name__", policy)), policy


def cost_of(optimizer: Stepper | None, cost: Cost | None) -> Cost:
    """The cost model asked for: bytes where there is an optimizer, else elements."""
    if cost is not None:
        if not callable(cost):
            raise TypeError(f"cost must be a function from specs to Weights, got {brief(cost)}")
        return cost
    return ElementCost() if optimizer is None else ByteCost(optimizer)


def assigned(
    specs: Specs,
    ranks: int,
    policy: Policy,
    optimizer: Stepper | None,
    cost: Cost,
    held: tuple[Sequence[int], Sequence[int]],
    options: Mapping[str, Any],
) -> Assignment:
    """Run a policy, and see to it that no rule gets less than it needs.

    Args:
        held: for each rank, the cost and the elements that it has already.

    Raises:
        TypeError: a policy that returns no assignment, or an option that it does not have.
        ValueError: a parameter is cut where its optimizer does not allow it.
    """
    optimizers = [] if optimizer is None else optimizers_of(specs, optimizer)
    distinct = {id(one): one for one in optimizers}
    allowed = {key: (block_size_of(one.stages), kind_of(one)) for key, one in distinct.items()}
    problem = Problem(
        specs,
        tuple(spec.numel for spec in specs),
        cost(specs),
        ranks,
        tuple(held[0]),
        tuple(held[1]),
        math.lcm(*(block for block, kind in allowed.values() if kind == "pointwise")),
    )
    _check_options(policy, problem, options)
    found = policy(problem, **options)
    if not isinstance(found, Assignment):
        raise TypeError(f"a policy returns an Assignment, got {brief(found)}")
    if optimizers:
        _check_cuts(specs, found.pieces, [allowed[id(one)] for one in optimizers])
    return found


def _check_options(policy: Policy, problem: Problem, options: Mapping[str, Any]) -> None:
    """A policy takes these options.

    Raises:
        TypeError: it has another one, or needs one more.
    """
    try:
        signature = inspect.signature(policy)
    except ValueError:  # written in C
        return
    try:
        signature.bind(problem, **options)
    except TypeError as error:
        name = getattr(policy, "__name__", "policy")
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
                "'balanced'"
            )
        if start % block:
            raise ValueError(
                f"{specs[index].path!r} is cut at element {start}, but its optimizer allows cuts "
                f"at multiples of {block} elements only; give align={block}"
            )
