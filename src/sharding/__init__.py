"""The sharding planner: which rank owns which parameter. Between the core and the hooks.

A ``sharding.py`` in the folder of your script hides this package, because Python searches that
folder first: give your file another name.
"""

from sharding.cost import ByteCost, ComputeCost, ElementCost, Weights
from sharding.footprint import Weight
from sharding.matrices.optimizer import MatrixOwnerOptimizer
from sharding.ownership import OwnedRange, Owner
from sharding.pieces import Pieces
from sharding.plan_diff import PlanDiff
from sharding.planning import plan
from sharding.policies import (
    POLICIES,
    balanced,
    by_bucket,
    contiguous,
    ddp_buckets,
    elements,
    greedy,
    hierarchical,
    sliced,
    split_buckets,
)
from sharding.problem import Assignment, Problem
from sharding.report import Report
from sharding.resharding import RangeCopy, reshard
from sharding.shard_plan import ShardPlan
from sharding.spec import ParameterSpec, specs_of
from sharding.zero.optimizer import ZeroRedundancyOptimizer
from sharding.zero.read import read_state_dict

__all__ = [
    "POLICIES",
    "Assignment",
    "ByteCost",
    "ComputeCost",
    "ElementCost",
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
    "Weight",
    "Weights",
    "ZeroRedundancyOptimizer",
    "balanced",
    "by_bucket",
    "contiguous",
    "ddp_buckets",
    "elements",
    "greedy",
    "hierarchical",
    "plan",
    "read_state_dict",
    "reshard",
    "sliced",
    "specs_of",
    "split_buckets",
]
