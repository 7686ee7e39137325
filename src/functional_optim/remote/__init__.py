"""Optimizers whose parameters live on workers: threads, other processes, or Ray actors."""

from functional_optim.remote.counters import Counters
from functional_optim.remote.distributed_optimizer import DistributedOptimizer
from functional_optim.remote.errors import WorkerError
from functional_optim.remote.ray_transport import RayTransport
from functional_optim.remote.snapshot import Snapshot
from functional_optim.remote.snapshot_module import SnapshotModule
from functional_optim.remote.staleness import StaleError
from functional_optim.remote.thread_transport import ThreadTransport
from functional_optim.remote.transport import Transport

__all__ = [
    "Counters",
    "DistributedOptimizer",
    "RayTransport",
    "Snapshot",
    "SnapshotModule",
    "StaleError",
    "ThreadTransport",
    "Transport",
    "WorkerError",
]
