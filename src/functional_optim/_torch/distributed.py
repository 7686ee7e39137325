"""Distributed autograd, DDP, the end of a backward pass, process groups."""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from functional_optim._torch.missing import Missing, held


def is_valid_context(context_id: int) -> bool:
    """Return True if this process takes part in an open context of distributed autograd.

    Without torch's question: its gradients are asked for.
    """
    from torch.distributed import autograd as dist_autograd

    try:
        getattr(dist_autograd, "_is_valid_context", dist_autograd.get_gradients)(context_id)
    except RuntimeError:
        return False
    return True


def current_context_id() -> int | None:
    """The number of the context of distributed autograd that this thread is in; None outside.

    Raises:
        ImportError: torch does not say it.
    """
    from torch.distributed import autograd as dist_autograd

    without = Missing(
        "torch.distributed.autograd._current_context",
        "it is not known which pass reads parameters",
        "call modules without a SnapshotModule",
    )
    current = held(dist_autograd, "_current_context", without)
    try:
        found: int = current()._context_id()
    except RuntimeError:
        return None
    return found


_NO_TASK: Any = Missing(
    "torch._C._current_graph_task_id",
    "buckets of a static graph cannot be told apart in their first iteration",
    "step after backward",
)
current_graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _NO_TASK)
"""A number of the backward pass that runs; -1 outside of one."""


def is_strided_shard(placement: object) -> bool:
    """Return True if a placement is the one that FSDP2 gives parameters of tensor parallelism.

    Its parts are disjoint and cover the tensor, as those of Shard do, but it is no Shard. A torch
    without the class has no such placement.
    """
    from torch.distributed.tensor import placement_types

    return isinstance(placement, getattr(placement_types, "_StridedShard", ()))


IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""Where torch's own function keeps the optimizers of a parameter, and users look for them."""
OPTIMIZER_CLASSES = "_optimizer_classes"
"""Beside them, their classes."""
OPTIMIZER_KWARGS = "_optimizer_kwargs"
"""Beside them, the arguments that they were made of."""

ACTIVE_DDP_MODULE = "_active_ddp_module"
"""Where the class of DDP notes, for torch.compile, which module is in its forward pass."""


def rpc_over_sockets(**options: Any) -> Any:
    """Options of ``init_rpc`` by which processes speak over sockets.

    Left to itself torch has processes of one machine speak through shared memory, and a thread of
    each look for messages without rest: where there are as many processes as processors, they take
    twice as long for the same. Where torch does not take the option, as it likes.

    Args:
        options: of ``TensorPipeRpcBackendOptions``.
    """
    from torch.distributed import rpc

    kind: Any = rpc.TensorPipeRpcBackendOptions
    taken = inspect.signature(kind.__init__).parameters
    return kind(**options, **({"_transports": ["uv"]} if "_transports" in taken else {}))


def queue_callback(callback: Callable[[], object]) -> None:
    """Call back when the backward pass that runs has ended; hooks of tensors come too early.

    Raises:
        ImportError: torch does not take it.
    """
    without = Missing(
        "torch.autograd.Variable._execution_engine",
        "nothing can be done at the end of a backward pass",
        "step after backward",
    )
    engine: Any = held(torch.autograd.Variable, "_execution_engine", without)
    engine.queue_callback(callback)


def finish_init(ddp: Any) -> None:
    """Have a DDP module do now what it does before its first forward pass.

    Raises:
        ImportError: torch does it otherwise.
    """
    without = Missing(
        "torch.nn.parallel.DistributedDataParallel._lazy_init",
        "DDP would look for optimizers in backward by itself, and register its own hook",
        "step after backward",
    )
    held(ddp, "_lazy_init", without)()


def ignored_by_ddp(module: nn.Module) -> Sequence[str]:
    """The parameters that a module's user has told DDP to leave alone."""
    return tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def is_joining(joinable: Any) -> bool:
    """Return True if a DDP module or an optimizer is under ``Join``: ranks may run out of data.

    Raises:
        ImportError: torch does not say it.
    """
    without = Missing(
        "torch.distributed.algorithms.Joinable._join_config",
        "it is not known whether ranks may run out of data",
        "step after backward",
    )
    return bool(held(joinable, "_join_config", without).enable)


def is_profiling() -> bool:
    """Return True if a profiler is active, or if torch cannot tell."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def gloo_options(group: Any, ranks: Sequence[int], timeout: timedelta) -> Any:
    """Return options for a part of a group of gloo, for ``group.split_group``.

    The part has the network interfaces of its parent, as ``GLOO_SOCKET_IFNAME`` names them: torch
    reads that variable in ``init_process_group`` and ``new_group`` only.

    ``split_group`` reads the ranks of the parent from its options. torch 2.13 leaves them empty for
    the world, and then reads beyond the end of the list, so they are written there.

    Args:
        group: the group to be split, with gloo for the CPU.
        ranks: all its ranks, by their numbers in the world.
        timeout: of the part.

    Raises:
        ImportError: torch does not make them so.
    """
    without = Missing(
        "torch.distributed.ProcessGroupGloo._Options",
        "no group can be split from another over gloo",
        "give a group of all ranks",
    )
    gloo = getattr(torch.distributed, "ProcessGroupGloo", None)
    options = held(gloo, "_Options", without)()
    parent = held(group, "_get_backend", without)(torch.device("cpu"))
    own = held(parent, "options", without)
    own.global_ranks_in_group = list(ranks)
    options._devices = held(own, "_devices", without)
    options._threads = held(own, "_threads", without)
    options._timeout = timeout
    return options


def group_count() -> int:
    """Return how many groups this process knows: torch names some new ones by it.

    Raises:
        ImportError: torch does not say it.
    """
    without = Missing(
        "torch.distributed.distributed_c10d._world.pg_names",
        "ranks that know different groups cannot agree on the name of a new one",
        "give a group of all ranks",
    )
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return len(held(world, "pg_names", without))


def holders_of(tensor: Any) -> int:
    """Return how many hold a tensor, all of Python counted as one.

    Raises:
        ImportError: torch does not say it.
    """
    without = Missing(
        "torch.Tensor._use_count",
        "it is not known when a thread of gloo has let go of a tensor",
        "step after backward",
    )
    count: int = held(tensor, "_use_count", without)()
    return count


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """After how long without the others an operation of a group on a device is an error.

    Raises:
        ImportError: torch does not say it.
    """
    without = Missing(
        "torch.distributed.ProcessGroup._get_backend(device).options._timeout",
        "it is not known how long other ranks are waited for",
        "train in one process",
    )
    backend = held(group, "_get_backend", without)(device)
    found: timedelta = held(getattr(backend, "options", None), "_timeout", without)
    return found
