"""Optimizers whose parameters live on workers: threads of this process, or other processes."""

from functional_optim.remote.distributed_optimizer import DistributedOptimizer
from functional_optim.remote.errors import WorkerError
from functional_optim.remote.threads import ThreadTransport
from functional_optim.remote.transport import Transport

__all__ = ["DistributedOptimizer", "ThreadTransport", "Transport", "WorkerError"]
