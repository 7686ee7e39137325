"""plan(): parameters, ranks and a policy, to a ShardPlan."""

from typing import Any

from sharding.assignment import assign, policy_named
from sharding.cost import Cost
from sharding.model_specs import as_specs
from sharding.problem import Policy, checked_ranks
from sharding.shard_plan import ShardPlan
from sharding.steppers import Stepper


def plan(
    specs: Any,
    world_size: int,
    policy: str | Policy = "largest_first",
    optimizer: Stepper | None = None,
    *,
    cost: Cost | None = None,
    **options: Any,
) -> ShardPlan:
    """Decide which rank owns which parameter, or which range of its elements.

    Pure: no process group, no tensor is made or read, the same plan on every rank. Parameters may
    be on the meta device.

    Args:
        specs: :class:`ParameterSpec` of each parameter, a ``torch.nn.Module``, or tensors by name.
        world_size: how many ranks share them. There may be more ranks than parameters.
        policy: a key of :data:`sharding.POLICIES`, or a function from a
            :class:`~sharding.problem.Problem` to an :class:`~sharding.problem.Assignment`.
        optimizer: what will step them, or a function from a spec to that. Given one, bytes of
            parameter, gradient and state are levelled (by "two_resource", the time of a step too),
            and no parameter is cut where a stage of it would not allow it. Without: elements.
        cost: what to level instead: :class:`ElementCost`, :class:`ByteCost`, :class:`FlopCost`,
            :class:`StepCost`, or any function from specs to :class:`Weights` or :class:`Costs`.
        options: of the policy, such as ``align`` and ``mixed`` of "elements", ``node_size`` and
            ``within`` of "hierarchical".

    Returns:
        A :class:`ShardPlan`.

    Raises:
        TypeError: something of a wrong type, or an option that the policy does not have.
        ValueError: ``world_size`` below 1 or above 262,144, a path that stands twice, an unknown
            policy (the error has the names), a per_matrix parameter where the policy cuts.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 2))
        >>> round(plan(model, 4, "greedy").report().imbalance("elements"), 3)
        3.828
        >>> round(plan(model, 4, "elements").report().imbalance("elements"), 3)
        1.005
    """
    checked_ranks(world_size)
    name, function = policy_named(policy)
    known = as_specs(specs, optimizer)
    found = assign(known, world_size, function, optimizer, cost, options)
    name = f"{name}/{found.within}" if found.within else name
    return ShardPlan(world_size, known, found.pieces, name, found.replicas)
