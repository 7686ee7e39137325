"""Steps of parameter groups, by plans."""

from functional_optim.core.overrides import LeafChain
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_parts import GroupPart
from functional_optim.frontends.group_steps import NO_STATE, CurrentGroups, GroupSteps
from functional_optim.frontends.group_tensors import Gradients, Group, StatesOf
from functional_optim.optimizer.explain import waiting_lines
from functional_optim.plan.leaf_by_leaf import BetweenRuns, check_extra
from functional_optim.plan.step_leaves import StepLeaf

__all__ = [
    "NO_STATE",
    "BetweenRuns",
    "CurrentGroups",
    "Gradients",
    "Group",
    "GroupChains",
    "GroupPart",
    "GroupSteps",
    "LeafChain",
    "StatesOf",
    "StepLeaf",
    "check_extra",
    "waiting_lines",
]
