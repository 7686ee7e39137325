"""Steps of parameter groups, by plans."""

from functional_optim.core.overrides import LeafChain
from functional_optim.frontends.explicit_gradients import ExplicitGradients
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_parts import GroupPart
from functional_optim.frontends.group_steps import NO_STATE, CurrentGroups
from functional_optim.frontends.group_tensors import Gradients, Group
from functional_optim.frontends.step_buckets import BucketMember, StepBucket
from functional_optim.plan.leaf_by_leaf import BetweenRuns, check_extra
from functional_optim.plan.step_leaves import StepLeaf
