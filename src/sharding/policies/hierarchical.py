"""``hierarchical``: shard within a node, replicate across nodes."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sharding.policies.contiguous import contiguous
from sharding.policies.elements import elements
from sharding.policies.greedy import greedy
from sharding.policies.largest_first import largest_first
from sharding.policies.sliced import sliced
from sharding.policies.two_resource import two_resource
from sharding.problem import Assignment, Policy, Problem, check_int

WITHIN: Mapping[str, Policy] = MappingProxyType(
    {
        "greedy": greedy,
        "largest_first": largest_first,
        "contiguous": contiguous,
        "elements": elements,
        "sliced": sliced,
        "two_resource": two_resource,
    }
)
"""Policies for the ranks of one replica, by name."""

REMOVED: Mapping[str, str] = MappingProxyType(
    {"balanced": "largest_first", "by_bucket": "contiguous", "split_buckets": "sliced"}
)
"""The replacement of each removed policy."""


def removed(name: str) -> str:
    """Return the error text for a removed policy."""
    return f"the policy {name!r} was removed; its replacement is {REMOVED[name]!r}"


def hierarchical(
    problem: Problem, *, node_size: int, within: str = "largest_first", **options: Any
) -> Assignment:
    """Shard all elements within each node, so that parameters are sent within nodes only.

    Ranks ``n * node_size`` to ``(n + 1) * node_size - 1`` are node ``n``. Corresponding ranks of
    all nodes own the same elements. Between nodes, a rank reduces only the gradients of elements
    that it owns.

    Args:
        problem: the parameters, and the ranks of all nodes.
        node_size: ranks per node; it must divide the number of ranks.
        within: the policy for the ranks of a node.
        options: of that policy.

    Returns:
        The pieces of one node, and the number of nodes.

    Raises:
        TypeError: the node size is not an integer, or the policy does not have an option.
        ValueError: the node size does not divide the number of ranks, or the policy is unknown.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec(name, (size,)) for name, size in zip("abc", (4, 2, 2))]
        >>> nodes = plan(specs, 4, "hierarchical", node_size=2)
        >>> nodes.owners("a")[0].ranks
        (0, 2)

    Reference:
        Zhang et al., "MiCS: near-linear scaling for training gigantic model on public cloud",
        VLDB 2022.
    """
    if problem.ranks % check_int("node_size", node_size, 1):
        raise ValueError(
            f"node_size must divide the number of ranks, {problem.ranks}, got {node_size}"
        )
    if within in REMOVED:
        raise ValueError(removed(within))
    if within not in WITHIN:
        raise ValueError(f"within must be one of {', '.join(WITHIN)}, got {within!r}")
    node = replace(
        problem,
        ranks=node_size,
        loads=problem.loads[:node_size],
        time_loads=problem.time_loads[:node_size],
        elements=problem.elements[:node_size],
    )
    found = WITHIN[within](node, **options)
    return Assignment(found.pieces, problem.ranks // node_size, within)
