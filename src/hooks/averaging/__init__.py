"""Training on one's own, with a mean over ranks now and then: local SGD and what grew from it."""

from hooks.averaging.averagers import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    ScheduledModelAverager,
)
from hooks.averaging.gossip import GossipModelAverager
from hooks.averaging.model_averager import ModelAverager
from hooks.averaging.muloco import muloco_inner
from hooks.averaging.outer import OuterModelAverager
from hooks.averaging.post_local_sgd_hook import PostLocalSGDState, post_localSGD_hook
from hooks.averaging.post_local_sgd_optimizer import PostLocalSGDOptimizer
from hooks.averaging.power_sgd import PowerSGDMemory, power_sgd_hook
from hooks.averaging.presets import (
    GOSSIP_SETTINGS,
    OUTER_SETTINGS,
    GossipSettings,
    OuterSettings,
    slowmo,
)
from hooks.averaging.replicas import ReplicatedModel, ReplicatedOptimizer, at_once, one_by_one
from hooks.averaging.schedule import AveragingSchedule
from hooks.averaging.stacked import StackedReplicas

__all__ = [
    "GOSSIP_SETTINGS",
    "OUTER_SETTINGS",
    "AveragingSchedule",
    "GossipModelAverager",
    "GossipSettings",
    "HierarchicalModelAverager",
    "ModelAverager",
    "OuterModelAverager",
    "OuterSettings",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDMemory",
    "ReplicatedModel",
    "ReplicatedOptimizer",
    "ScheduledModelAverager",
    "StackedReplicas",
    "at_once",
    "muloco_inner",
    "one_by_one",
    "post_localSGD_hook",
    "power_sgd_hook",
    "slowmo",
]
