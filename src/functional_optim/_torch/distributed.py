"""Private names of torch for distributed autograd, DDP, backward passes and process groups."""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from functional_optim._torch.missing_name import MissingName, get_private


def is_valid_context(context_id: int) -> bool:
    """Return True if this process is in an open context of distributed autograd.

    Without the private function, the public ``get_gradients`` raises an error for other contexts.
    """
    from torch.distributed import autograd as dist_autograd

    try:
        getattr(dist_autograd, "_is_valid_context", dist_autograd.get_gradients)(context_id)
    except RuntimeError:
        return False
    return True


def current_context_id() -> int | None:
    """Return the id of this thread's context of distributed autograd, or None outside of one."""
    from torch.distributed import autograd as dist_autograd

    without = MissingName(
        "torch.distributed.autograd._current_context",
        "it is not known which pass reads parameters",
        "call modules without a SnapshotModule",
    )
    current = get_private(dist_autograd, "_current_context", without)
    try:
        found: int = current()._context_id()
    except RuntimeError:
        return None
    return found


_NO_TASK: Any = MissingName(
    "torch._C._current_graph_task_id",
    "buckets of a static graph cannot be told apart in their first iteration",
    "step after backward",
)
current_graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _NO_TASK)
"""Return the id of the current backward pass; -1 outside of one."""


def is_strided_shard(placement: object) -> bool:
    """Return True for ``_StridedShard``, the placement of FSDP2 with tensor parallelism.

    Its shards are disjoint and cover the tensor, like those of Shard, but it is not a Shard.
    """
    from torch.distributed.tensor import placement_types

    return isinstance(placement, getattr(placement_types, "_StridedShard", ()))


IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""Attribute of a parameter for its optimizers in backward, as in torch's own function."""
OPTIMIZER_CLASSES = "_optimizer_classes"
"""Attribute of a parameter for the classes of these optimizers."""
OPTIMIZER_KWARGS = "_optimizer_kwargs"
"""Attribute of a parameter for the arguments of these optimizers."""

ACTIVE_DDP_MODULE = "_active_ddp_module"
"""Attribute of the DDP class for the module in its forward pass, for torch.compile."""


def rpc_over_sockets(**options: Any) -> Any:
    """Return options of ``init_rpc`` for messages over sockets.

    By default, processes of one machine use shared memory, and one thread of each process polls
    for messages. With as many processes as cores, this takes twice as long. If torch does not have
    the option, the default is used.
    """
    from torch.distributed import rpc

    kind: Any = rpc.TensorPipeRpcBackendOptions
    known = inspect.signature(kind.__init__).parameters
    return kind(**options, **({"_transports": ["uv"]} if "_transports" in known else {}))


def queue_callback(callback: Callable[[], object]) -> None:
    """Call a function at the end of the current backward pass; hooks of tensors run too early."""
    without = MissingName(
        "torch.autograd.Variable._execution_engine",
        "nothing can be done at the end of a backward pass",
        "step after backward",
    )
    engine: Any = get_private(torch.autograd.Variable, "_execution_engine", without)
    engine.queue_callback(callback)


def finish_init(ddp: Any) -> None:
    """Run the lazy initialization of a DDP module, which it runs before its first forward pass."""
    without = MissingName(
        "torch.nn.parallel.DistributedDataParallel._lazy_init",
        "DDP would look for optimizers in backward by itself, and register its own hook",
        "step after backward",
    )
    get_private(ddp, "_lazy_init", without)()


def ignored_by_ddp(module: nn.Module) -> Sequence[str]:
    """Return the names of the parameters of a module that DDP ignores."""
    return tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def is_joining(joinable: Any) -> bool:
    """Return True if a DDP module or an optimizer is in ``Join``: ranks may run out of data."""
    without = MissingName(
        "torch.distributed.algorithms.Joinable._join_config",
        "it is not known whether ranks may run out of data",
        "step after backward",
    )
    return bool(get_private(joinable, "_join_config", without).enable)


def is_profiling() -> bool:
    """Return True if a profiler is active, or if torch does not give this flag."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def gloo_options(group: Any, ranks: Sequence[int], timeout: timedelta) -> Any:
    """Return options of ``group.split_group`` for a gloo group.

    The options have the network interfaces of the parent: torch reads ``GLOO_SOCKET_IFNAME`` only
    in ``init_process_group`` and ``new_group``. All global ranks of the parent are written to the
    parent's options, where ``split_group`` reads them. In torch 2.13 they are empty for the world,
    and ``split_group`` would read beyond the end of the list.
    """
    without = MissingName(
        "torch.distributed.ProcessGroupGloo._Options",
        "no group can be split from another over gloo",
        "give a group of all ranks",
    )
    gloo = getattr(torch.distributed, "ProcessGroupGloo", None)
    options = get_private(gloo, "_Options", without)()
    parent = get_private(group, "_get_backend", without)(torch.device("cpu"))
    own = get_private(parent, "options", without)
    own.global_ranks_in_group = list(ranks)
    options._devices = get_private(own, "_devices", without)
    options._threads = get_private(own, "_threads", without)
    options._timeout = timeout
    return options


def group_count() -> int:
    """Return the number of groups of this process, which torch uses in the names of new groups."""
    without = MissingName(
        "torch.distributed.distributed_c10d._world.pg_names",
        "ranks that know different groups cannot agree on the name of a new one",
        "give a group of all ranks",
    )
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return len(get_private(world, "pg_names", without))


def use_count(tensor: Any) -> int:
    """Return the reference count of a tensor in C++; all references of Python count as one."""
    without = MissingName(
        "torch.Tensor._use_count",
        "it is not known when a thread of gloo has let go of a tensor",
        "step after backward",
    )
    count: int = get_private(tensor, "_use_count", without)()
    return count


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of a group's operations on a device."""
    without = MissingName(
        "torch.distributed.ProcessGroup._get_backend(device).options._timeout",
        "it is not known how long other ranks are waited for",
        "train in one process",
    )
    backend = get_private(group, "_get_backend", without)(device)
    found: timedelta = get_private(getattr(backend, "options", None), "_timeout", without)
    return found
