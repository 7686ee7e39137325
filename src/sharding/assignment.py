"""From specs and a policy to pieces: the common part of making a plan and of extending one."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from functional_optim.core.brief import brief
from functional_optim.core.stage import block_size_of
from sharding.cost import ByteCost, Cost, ElementCost, StepCost, costs_of
from sharding.pieces import Pieces
from sharding.policies import POLICIES, REMOVED, hierarchical, removed, two_resource
from sharding.problem import Assignment, Policy, Problem, loads_of
from sharding.spec import Specs, kind_of
from sharding.steppers import Stepper, optimizers_of
from sharding.units import pieces_of_parameters, pieces_of_units, units_of

PolicyName = str
"""A key of :data:`sharding.POLICIES`."""


def policy_named(policy: PolicyName | Policy) -> tuple[str, Policy]:
    """The name of a policy, and the policy.

    Raises:
        TypeError: neither a name nor a function.
        ValueError: an unknown name, or that of a policy that was removed.
    """
    if isinstance(policy, str):
        if policy in REMOVED:
            raise ValueError(removed(policy))
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {brief(policy)}")
        return policy, POLICIES[policy]
    if not callable(policy):
        raise TypeError(f"policy must be a name or a function of a Problem, got {brief(policy)}")
    return str(getattr(policy, "__name__", policy)), policy


def cost_model(optimizer: Stepper | None, cost: Cost | None, *, has_time: bool) -> Cost:
    """Return the cost model asked for: of an optimizer its step or its bytes, else elements.

    Args:
        optimizer: what will step the parameters.
        cost: what the caller gave.
        has_time: whether the policy levels time, too.

    Raises:
        TypeError: a cost that is no function.
    """
    if cost is not None:
        if not callable(cost):
            raise TypeError(f"cost must be a function from specs to Weights, got {brief(cost)}")
        return cost
    if optimizer is None:
        return ElementCost()
    return StepCost(optimizer) if has_time else ByteCost(optimizer)


def _levels_time(policy: Any, options: Mapping[str, Any]) -> bool:
    """Return True for ``two_resource``, also with options or within nodes."""
    while policy is not two_resource:
        options = {**getattr(policy, "keywords", {}), **options}
        inner = getattr(policy, "func", getattr(policy, "__wrapped__", None))
        if inner is None:
            return policy is hierarchical and options.get("within") == "two_resource"
        policy = inner
    return True


class OwnedSpecs(NamedTuple):
    """Parameters that have owners already, in front of those to be assigned."""

    parameters: int
    """How many."""
    pieces: Pieces


NOTHING = OwnedSpecs(0, Pieces((), (), (), ()))


def assign(
    specs: Specs,
    ranks: int,
    policy: Policy,
    optimizer: Stepper | None,
    cost: Cost | None,
    options: Mapping[str, Any],
    owned: OwnedSpecs = NOTHING,
) -> Assignment:
    """Run a policy, and check that no rule gets less than it needs.

    Args:
        specs: of all parameters, those that have owners first.
        ranks: that share them.
        policy: decides who owns the others.
        optimizer: what will step them.
        cost: what to level; None for the one that goes with the optimizer and the policy.
        options: of the policy.
        owned: the parameters that have owners.

    Returns:
        The pieces of the parameters that had no owner, numbered from 0.

    Raises:
        TypeError: a policy that returns no assignment, or an option that it does not have.
        ValueError: a parameter is cut where its optimizer does not allow it.
    """
    units = units_of(specs)
    model = cost_model(optimizer, cost, has_time=_levels_time(policy, options))
    costs = costs_of(model, units.specs)
    own = pieces_of_units(owned.pieces, units)
    numels = tuple(spec.numel for spec in units.specs)
    sizes, elements = loads_of(own, numels, costs.bytes, ranks)
    times, _ = loads_of(own, numels, costs.time, ranks)
    new = units.after(owned.parameters)
    first = len(units.specs) - len(new.specs)
    optimizers = [] if optimizer is None else optimizers_of(new.specs, optimizer)
    distinct = {id(one): one for one in optimizers}
    allowed = {key: (block_size_of(one.stages), kind_of(one)) for key, one in distinct.items()}
    problem = Problem(
        new.specs,
        numels[first:],
        costs.bytes.after(first),
        costs.time.after(first),
        ranks,
        sizes,
        times,
        elements,
        math.lcm(*(block for block, kind in allowed.values() if kind == "pointwise")),
    )
    _check_options(policy, problem, options)
    found = policy(problem, **options)
    if not isinstance(found, Assignment):
        raise TypeError(f"a policy returns an Assignment, got {brief(found)}")
    if optimizers:
        _check_cuts(new.specs, found.pieces, [allowed[id(one)] for one in optimizers])
    return replace(found, pieces=pieces_of_parameters(found.pieces, new))


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
                "'largest_first'"
            )
        if start % block:
            raise ValueError(
                f"{specs[index].path!r} is cut at element {start}, but its optimizer allows cuts "
                f"at multiples of {block} elements only; give align={block}"
            )
