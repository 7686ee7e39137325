"""Sharded training by torch alone: DDP, its ZeroRedundancyOptimizer, FSDP2."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks import sharded as who
from benchmarks.sharded_models import Task


class Contestant(NamedTuple):
    """Contestant: a model, and how it is trained."""

    iterate: Callable[[], None]
    """One iteration: forward, backward, step."""
    params: Callable[[], Iterator[Tensor]]
    """Yields the whole parameters in the order of the model. The call is collective."""


Builder = Callable[[Task], Contestant]


def trained(
    module: nn.Module, task: Task, optimizer: Any, step: Callable[[], object]
) -> Contestant:
    """Return a contestant whose parameters are whole on every rank.

    Args:
        module: the module, which reduces gradients in its backward pass.
        task: the model and its data.
        optimizer: the optimizer, which clears the gradients.
        step: called after backward.
    """
    batch = task.batch(dist.get_rank())

    def iterate() -> None:
        optimizer.zero_grad()
        task.loss(module, batch).backward()
        step()

    return Contestant(iterate, module.parameters)


def wrapped(task: Task, *, views: bool) -> DistributedDataParallel:
    """Return the model in DDP."""
    return DistributedDataParallel(task.model(), gradient_as_bucket_view=views)


def _ddp(task: Task, *, views: bool, **options: Any) -> Contestant:
    module = wrapped(task, views=views)
    optimizer = AdamW(module.parameters(), **who.OPTIONS, **options)
    return trained(module, task, optimizer, optimizer.step)


def _zero(task: Task, *, views: bool, **options: Any) -> Contestant:
    module = wrapped(task, views=views)
    optimizer = zero(module.parameters(), views=views, **options)
    return trained(module, task, optimizer, optimizer.step)


def zero(params: Any, *, views: bool, **options: Any) -> Any:
    """Return torch's optimizer over these parameters."""
    # A late import, because torch's package warns about TorchScript when it is imported.
    cls = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    return cls(params, AdamW, parameters_as_bucket_view=views, **who.OPTIONS, **options)


def fully_sharded(task: Task) -> tuple[nn.Module, AdamW]:
    """Return the model in FSDP2, and an optimizer over its shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = task.model()
    for unit in task.units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters(), fused=True, **who.OPTIONS)


def _fsdp(task: Task) -> Contestant:
    model, optimizer = fully_sharded(task)

    def whole() -> Iterator[Tensor]:
        for param in model.parameters():
            shard: Any = param
            yield shard.full_tensor()

    return trained(model, task, optimizer, optimizer.step)._replace(params=whole)


BUILDERS: dict[str, Builder] = {
    who.DDP_FOREACH: lambda task: _ddp(task, views=False, foreach=True),
    who.DDP_FUSED: lambda task: _ddp(task, views=True, fused=True),
    who.TORCH_ZERO: lambda task: _zero(task, views=False),
    who.TORCH_BEST: lambda task: _zero(task, views=True, fused=True),
    who.FSDP: _fsdp,
}
