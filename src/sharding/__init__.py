"""Sharding: plans of which rank owns which parameter, and optimizers that follow a plan.

A ``sharding.py`` in the folder of your script hides this package, because Python searches that
folder first. Give your file another name.
"""

from typing import Any

from functional_optim.engine.stages import MatrixBlocks
from sharding.cost import ByteCost, ElementCost, FlopCost, StepCost
from sharding.matrices.optimizer import MatrixOwnerOptimizer
from sharding.model_specs import specs_of
from sharding.ownership import OwnedRange, Owner
from sharding.pieces import Pieces
from sharding.plan_diff import PlanDiff
from sharding.policies import (
    POLICIES,
    contiguous,
    elements,
    greedy,
    hierarchical,
    largest_first,
    sliced,
    two_resource,
)
from sharding.policies import REMOVED as _REMOVED
from sharding.policies import removed as _removed
from sharding.problem import Assignment, Problem
from sharding.report import Report
from sharding.resharding import RangeCopy, reshard
from sharding.shard_plan import ShardPlan, plan
from sharding.spec import ParameterSpec
from sharding.weights import Costs, Weight, Weights
from sharding.zero.old_checkpoint import read_state_dict
from sharding.zero.optimizer import ZeroRedundancyOptimizer
from sharding.zero.range_exchange import exchange

__all__ = [
    "POLICIES",
    "Assignment",
    "ByteCost",
    "Costs",
    "ElementCost",
    "FlopCost",
    "MatrixBlocks",
    "MatrixOwnerOptimizer",
    "OwnedRange",
    "Owner",
    "ParameterSpec",
    "Pieces",
    "PlanDiff",
    "Problem",
    "RangeCopy",
    "Report",
    "ShardPlan",
    "StepCost",
    "Weight",
    "Weights",
    "ZeroRedundancyOptimizer",
    "contiguous",
    "elements",
    "exchange",
    "greedy",
    "hierarchical",
    "largest_first",
    "plan",
    "read_state_dict",
    "reshard",
    "sliced",
    "specs_of",
    "two_resource",
]


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise AttributeError(_removed(name))
    others = {"ComputeCost": "FlopCost(optimizer)", "ddp_buckets": "the buckets of DDP itself"}
    if name in others:
        raise AttributeError(f"sharding.{name} was removed; its replacement is {others[name]}")
    raise AttributeError(f"module 'sharding' has no attribute {name!r}")
