"""Local SGD and its successors: each rank trains alone, and ranks sometimes average parameters."""

from typing import NoReturn

from hooks.averaging.averagers import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    ScheduledModelAverager,
)
from hooks.averaging.model_averager import ModelAverager
from hooks.averaging.outer import OuterModelAverager
from hooks.averaging.post_local_sgd_hook import PostLocalSGDState, post_localSGD_hook
from hooks.averaging.post_local_sgd_optimizer import PostLocalSGDOptimizer
from hooks.averaging.schedule import AveragingSchedule

__all__ = [
    "AveragingSchedule",
    "HierarchicalModelAverager",
    "ModelAverager",
    "OuterModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "ScheduledModelAverager",
    "post_localSGD_hook",
]

_IN_CONTRIB = "import it from hooks.averaging.contrib"
_OUTER = "write the outer rule yourself: OuterModelAverager(params, sgd(lr=0.7, momentum=0.9, \
nesterov=True), period=500); docs/concepts/averaging.md lists published settings"
_REPLICAS = "run ranks as threads of one process: sharding.transport.local.LocalWorld(8).run(train)"
_GONE = {
    "GossipModelAverager": _IN_CONTRIB,
    "PowerSGDMemory": _IN_CONTRIB,
    "power_sgd_hook": _IN_CONTRIB,
    "GOSSIP_SETTINGS": "GossipModelAverager of hooks.averaging.contrib has them as its defaults",
    "GossipSettings": "GossipModelAverager of hooks.averaging.contrib has them as its defaults",
    "OUTER_SETTINGS": _OUTER,
    "OuterSettings": _OUTER,
    "slowmo": "sgd(lr=1.0, momentum=0.7) is this outer rule",
    "muloco_inner": "docs/concepts/averaging.md makes it by partition, muon and adamw",
    "ReplicatedModel": _REPLICAS,
    "ReplicatedOptimizer": _REPLICAS,
    "StackedReplicas": _REPLICAS,
    "at_once": _REPLICAS,
    "one_by_one": _REPLICAS,
}
"""Removed names, and what replaces each."""


def __getattr__(name: str) -> NoReturn:
    if name in _GONE:  # ``from hooks.averaging import`` drops the text of an AttributeError
        raise ImportError(f"hooks.averaging has no {name} any more: {_GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
