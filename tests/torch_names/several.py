"""Rows for modules, GradScaler, backward passes, DDP and process groups."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd import profiler
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import placement_types
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..worlds import world_of_one
from .table import row

CPU = torch.device("cpu")
SECONDS = timedelta(seconds=77)
C10D: Any = dist.distributed_c10d


class _Tree(nn.Module):
    """Module that registers one child twice, and None as another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.BatchNorm1d(2)
        self.none: nn.Module | None
        self.register_module("none", None)
        self.kept = [1]


@row(("nn.Module", "_modules"))
def children(names: Any) -> None:
    tree = _Tree()
    assert names.get_children(tree) == {"first": tree.first, "again": tree.first, "none": None}
    names.get_children(tree)["again"] = None
    assert tree.again is None  # get_children returns the dict of the module


@row((nn.Module, "_replicate_for_data_parallel"), ("nn.Module", "_parameters"), ("it", "_buffers"))
def replicas(names: Any) -> None:
    for module in (_Tree(), nn.BatchNorm1d(2)):
        made = names.copy_module(module)
        assert type(made) is type(module) and made is not module
        parts = ("_parameters", "_buffers", "_modules")
        for mine, own in ((vars(made)[part], vars(module)[part]) for part in parts):
            assert mine is not own and list(mine) == list(own)
            assert all(mine[name] is own[name] for name in own)
    assert names.copy_module(tree := _Tree()).kept is tree.kept


@row(("nn.RNNBase", "_flat_weights"))
def replica_of_lists_beside_parameters(names: Any) -> None:
    """The copy of an LSTM has its own list of flat weights."""
    module = nn.LSTM(2, 2)
    assert vars(names.copy_module(module))["_flat_weights"] is not vars(module)["_flat_weights"]


class _Owner(torch.optim.SGD):
    """Optimizer class in which a row hides names."""


OWNER = _Owner([torch.zeros(1)], lr=0.1)


@row(
    (OWNER, "_optimizer_load_state_dict_pre_hooks"),
    (OWNER, "_optimizer_load_state_dict_post_hooks"),
    refuses=lambda names: names.load_state_dict_hooks(OWNER),
)
def hooks_of_loading(names: Any) -> None:
    optimizer = _Owner([torch.zeros(1)], lr=0.1)
    assert [list(one) for one in names.load_state_dict_hooks(optimizer)] == [[], []]

    def before(optimizer: Any, state_dict: Any) -> None: ...
    def after(optimizer: Any) -> None: ...

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    assert [list(one) for one in names.load_state_dict_hooks(optimizer)] == [[before], [after]]


@row(
    (OWNER, "_optimizer_step_pre_hooks"),
    (OWNER, "_optimizer_step_post_hooks"),
    refuses=lambda names: names.step_without_global_hooks(OWNER),
)
def hooks_of_steps(names: Any) -> None:
    """The step calls the hooks of the optimizer, and no global hooks."""
    optimizer, seen = _Owner([torch.zeros(1)], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    of_all = register_optimizer_step_pre_hook(lambda *_: seen.append("of all"))
    try:
        names.step_without_global_hooks(optimizer)
        assert seen == ["before", "after"]
        optimizer.step()
        assert seen[2:] == ["of all", "before", "after"]
    finally:
        of_all.remove()


SCALER = GradScaler("cpu")


@row(
    (SCALER, "_per_optimizer_states"),
    refuses=lambda names: names.scaler_state(SCALER, OWNER),
)
def scaler_states(names: Any) -> None:
    """GradScaler uses the state that we write: it skips an infinite step and lowers the scale."""
    for infinite in (0.0, 1.0):
        param = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(param.sum()).backward()
        found = names.scaler_state(scaler, optimizer)
        assert found["stage"] is OptState.READY and found["found_inf_per_device"] == {}
        found["found_inf_per_device"] = {CPU: torch.tensor(infinite)}
        found["stage"] = OptState.UNSCALED
        scaler.step(optimizer)
        assert param.item() == (0.0 if infinite else -4.0)
        scaler.update()
        assert scaler.get_scale() == (2.0 if infinite else 4.0)
        assert names.scaler_state(scaler, optimizer)["stage"] is OptState.READY


@row((GradScaler, "_get_scale_async"))
def scalers_in_use(names: Any) -> None:
    used = GradScaler("cpu")
    assert names.has_scaled(used) is (getattr(used, "_get_scale_async", None) is None)
    used.scale(torch.ones(()))
    assert names.has_scaled(used)


@contextmanager
def _rpc_of_one(options: Any = rpc.TensorPipeRpcBackendOptions) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        place = options(init_method=(Path(folder) / "met").as_uri())
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=place)
        try:
            yield
        finally:
            rpc.shutdown(graceful=False)


@row(("rpc.TensorPipeRpcBackendOptions", "_transports"))
def sockets_of_rpc(names: Any) -> None:
    """With this option, no thread of RPC polls shared memory."""
    with _rpc_of_one(names.rpc_over_sockets):
        tasks = Path("/proc/self/task").glob("*/comm")
        assert not any("SHM" in task.read_text() for task in tasks)


@row((dist_autograd, "_is_valid_context"))
def open_contexts(names: Any) -> None:
    with _rpc_of_one():
        with dist_autograd.context() as number:
            assert names.is_valid_context(number) and not names.is_valid_context(number + 1)
        assert not names.is_valid_context(number)


@row(
    (dist_autograd, "_current_context"),
    ("it", "_context_id"),
    refuses=lambda names: names.current_context_id(),
)
def current_context(names: Any) -> None:
    assert names.current_context_id() is None
    with _rpc_of_one():
        assert names.current_context_id() is None
        for _ in range(2):
            with dist_autograd.context() as number:
                assert names.current_context_id() == number
        assert names.current_context_id() is None


def _in_backward(*functions: Any) -> list[Any]:
    """Call functions within a backward pass, and return their results."""
    found: list[Any] = []
    param = torch.ones(1, requires_grad=True)
    param.register_hook(lambda _: found.extend(one() for one in functions))
    param.sum().backward()
    return found


@row(
    (torch._C, "_current_graph_task_id"),
    refuses=lambda names: names.current_graph_task_id(),
)
def numbers_of_backward_passes(names: Any) -> None:
    ask = names.current_graph_task_id
    (first, again), (second,) = _in_backward(ask, ask), _in_backward(ask)
    assert first == again >= 0 and second >= 0 and first != second
    assert ask() == -1


@row(
    (torch.autograd.Variable, "_execution_engine"),
    refuses=lambda names: names.queue_callback(print),
)
def end_of_backward(names: Any) -> None:
    """A callback that a callback queues runs after all callbacks that were queued before."""
    order: list[str] = []
    param = torch.ones(1, requires_grad=True)

    def during(_: Any) -> None:
        names.queue_callback(lambda: names.queue_callback(lambda: order.append("at the end")))
        names.queue_callback(lambda: order.append("queued"))

    param.register_hook(during)
    param.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    param.sum().backward()
    assert order == ["accumulated", "queued", "at the end"]


@row(("it", "_in_backward_optimizers"), ("it", "_optimizer_classes"), ("it", "_optimizer_kwargs"))
def optimizers_in_backward(names: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    param = nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
    (optimizer,) = getattr(param, names.IN_BACKWARD_OPTIMIZERS)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["lr"] == 0.5
    assert getattr(param, names.OPTIMIZER_CLASSES) == [torch.optim.SGD]
    assert getattr(param, names.OPTIMIZER_KWARGS) == [{"lr": 0.5}]


@row((DistributedDataParallel, "_lazy_init"), refuses=lambda names: names.finish_init(None))
def end_of_init(names: Any) -> None:
    """After ``finish_init``, DDP no longer looks for optimizers in its first forward pass."""
    with world_of_one():
        module = nn.Linear(2, 1)
        ddp = DistributedDataParallel(module)
        names.finish_init(ddp)
        setattr(module.weight, names.IN_BACKWARD_OPTIMIZERS, [None])
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.register_comm_hook(None, allreduce_hook)  # raises if DDP had set its own hook


@row((torch.Tensor, "_use_count"), refuses=lambda names: names.use_count(None))
def holders_of_a_tensor(names: Any) -> None:
    with world_of_one():
        tensor = torch.ones(2)
        also = [tensor]
        assert names.use_count(tensor) == 1
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert names.use_count(tensor) > 1  # the work references the tensor
        del work
        until = time.monotonic() + 60
        while names.use_count(also[0]) > 1 and time.monotonic() < until:
            time.sleep(0.001)
        assert names.use_count(tensor) == 1


@row((DistributedDataParallel, "_active_ddp_module"))
def module_in_its_forward_pass(names: Any) -> None:
    seen: list[Any] = []

    def look() -> Any:
        return getattr(DistributedDataParallel, names.ACTIVE_DDP_MODULE)

    with world_of_one():
        ddp = DistributedDataParallel(nn.Linear(2, 1))
        handle: RemovableHandle = ddp.module.register_forward_hook(lambda *_: seen.append(look()))
        ddp(torch.ones(1, 2))
        handle.remove()
    assert seen == [ddp] and look() is None


@row(("it", "_ddp_params_and_buffers_to_ignore"))
def ignored_parameters(names: Any) -> None:
    module: Any = nn.Linear(2, 1)
    assert list(names.ignored_by_ddp(module)) == []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert list(names.ignored_by_ddp(module)) == ["bias"]


@row(("it", "_join_config"), refuses=lambda names: names.is_joining(nn.Linear(1, 1)))
def joining(names: Any) -> None:
    with world_of_one():
        ddp = DistributedDataParallel(nn.Linear(2, 1))
        assert names.is_joining(ddp) is False
        for enable in (True, False):
            with Join([ddp], enable=enable):
                assert names.is_joining(ddp) is enable
                ddp(torch.ones(1, 2)).sum().backward()


@row((profiler, "_is_profiler_enabled"))
def profiling(names: Any) -> None:
    with profiler.profile():
        assert names.is_profiling() is True
    assert names.is_profiling() is not hasattr(profiler, "_is_profiler_enabled")


@row((placement_types, "_StridedShard"))
def strided_shards(names: Any) -> None:
    kind = getattr(placement_types, "_StridedShard", None)
    assert kind is None or names.is_strided_shard(kind(0, split_factor=2))
    assert not names.is_strided_shard(placement_types.Shard(0))


@row(
    (dist.ProcessGroupGloo, "_Options"),
    (dist.ProcessGroupGloo._Options, "_devices"),
    (dist.ProcessGroupGloo._Options, "_threads"),
    refuses=lambda names: names.gloo_options(None, [0], SECONDS),
)
def options_of_gloo(names: Any) -> None:
    """Groups with these options work repeatedly.

    torch reads out of bounds if the list of ranks is empty, so the options name the ranks.
    """
    for _ in range(3):
        with world_of_one():
            world: Any = dist.group.WORLD
            options = names.gloo_options(world, [0], SECONDS)
            part = world.split_group([0], SECONDS, options, "part", "", [CPU])
            total = torch.ones(2)
            part.allreduce([total]).wait()
            assert total.tolist() == [1.0, 1.0]
            assert names.timeout_of(part, CPU) == SECONDS
            own, others = (one._get_backend(CPU).options for one in (part, world))
            assert own.global_ranks_in_group == others.global_ranks_in_group == [0]
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo,lo"}), world_of_one():
        # The group uses the interfaces of its parent, not the one of the host name.
        devices = names.gloo_options(dist.group.WORLD, [0], SECONDS)._devices
        assert len(devices) == 2
        assert devices == dist.group.WORLD._get_backend(CPU).options._devices  # type: ignore[union-attr]  # there is one


@row((C10D, "_world"), refuses=lambda names: names.group_count())
def number_of_groups(names: Any) -> None:
    with world_of_one():
        name, count = C10D._hash_ranks_to_str([0]), names.group_count()
        filler = dist.new_group([0], use_local_synchronization=True)
        assert names.group_count() == count + 1
        assert C10D._hash_ranks_to_str([0]) != name  # names depend on the number of groups
        dist.destroy_process_group(filler)
        assert names.group_count() == count and C10D._hash_ranks_to_str([0]) == name


@row(("it", "_get_backend"), ("it", "_timeout"), refuses=lambda names: names.timeout_of(None, CPU))
def timeouts(names: Any) -> None:
    with world_of_one(timeout=SECONDS):
        assert names.timeout_of(dist.group.WORLD, CPU) == SECONDS
        other = dist.new_group([0], timeout=timedelta(seconds=78))
        assert names.timeout_of(other, CPU) == timedelta(seconds=78)


@row(
    (torch.serialization, "_get_layout"),
    (filesystem, "_StorageInfo"),
    refuses=lambda names: names.names_in_metadata(),
)
def names_in_metadata(names: Any) -> None:
    """Each object has the module and the name under which metadata pickles it."""
    for (module, name), one in names.names_in_metadata().items():
        assert (one.__module__, one.__qualname__) == (module, name)
