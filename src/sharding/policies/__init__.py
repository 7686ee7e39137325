"""Policies: pure functions that assign parameters to ranks, one file each."""

from collections.abc import Mapping
from types import MappingProxyType

from sharding.policies.contiguous import contiguous
from sharding.policies.elements import elements
from sharding.policies.greedy import greedy
from sharding.policies.hierarchical import REMOVED, WITHIN, hierarchical, removed
from sharding.policies.largest_first import largest_first
from sharding.policies.sliced import sliced
from sharding.policies.two_resource import two_resource
from sharding.problem import Policy

__all__ = [
    "POLICIES",
    "REMOVED",
    "contiguous",
    "elements",
    "greedy",
    "hierarchical",
    "largest_first",
    "removed",
    "sliced",
    "two_resource",
]

POLICIES: Mapping[str, Policy] = MappingProxyType({**WITHIN, "hierarchical": hierarchical})
"""All policies, by the name that ``plan`` accepts."""
