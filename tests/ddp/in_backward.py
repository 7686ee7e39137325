"""What the ranks do: a DDP module that steps in backward beside its twin that steps after it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import TorchOptimizer, adamw
from hooks import apply_optimizer_in_backward
from hooks.in_backward import get_in_backward_optimizers

WIDTH = 24


class Model(nn.Module):
    """Layers in several layouts, one that only some ranks use, one that nobody uses."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        if branches:
            self.odd = nn.Linear(WIDTH, WIDTH)
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.branches = branches

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x + self.conv(x.view(-1, 2, 3, 4)).reshape(x.shape)
        return self.odd(x) if self.branches and rank == 1 else x


class Case(NamedTuple):
    """One comparison."""

    optimizer_class: Any = torch.optim.AdamW
    kwargs: Mapping[str, Any] = {"lr": 0.01, "foreach": False}
    twin: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(
        params, lr=0.01, foreach=False
    )
    ddp: Mapping[str, Any] = {}
    when: str = "before"
    """Applied before wrapping, after it, or after some iterations ("late")."""
    branches: bool = False
    parts: int = 1
    """Backward passes per iteration; all but the last are under ``no_sync``."""
    register_hook: bool = True


OURS = Case(adamw(lr=0.01), {}, twin=lambda params: TorchOptimizer(list(params), adamw(lr=0.01)))
CASES = {
    "before": Case(),
    "after": Case(when="after"),
    "late": Case(when="late"),
    "bucket views": Case(ddp={"gradient_as_bucket_view": True}),
    "ours, before": OURS,
    "ours, after, bucket views": OURS._replace(when="after", ddp={"gradient_as_bucket_view": True}),
    "unused": Case(ddp={"find_unused_parameters": True}, branches=True),
    "unused, bucket views": Case(
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}, branches=True
    ),
    "static graph": Case(ddp={"static_graph": True}),
    "no_sync": Case(parts=3),
    "no_sync, bucket views": Case(parts=2, ddp={"gradient_as_bucket_view": True}),
    "no hook of its own": Case(register_hook=False),
}


def loss_of(module: nn.Module, iteration: int, part: int = 0) -> Tensor:
    rank = dist.get_rank()
    chance = torch.Generator().manual_seed(rank + 10 * iteration + 1000 * part)
    x = torch.randn(5, WIDTH, generator=chance)
    value: Tensor = module(x, rank).square().mean()
    return value


def backward(ddp: DistributedDataParallel, iteration: int, parts: int) -> None:
    for part in range(parts):
        with nullcontext() if part == parts - 1 else ddp.no_sync():
            loss_of(ddp, iteration, part).backward()


def wrapped(module: nn.Module, case: Case) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.004, **case.ddp)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def equal_on_all_ranks(module: nn.Module) -> bool:
    return all(_equal(param) for param in module.parameters())


def _equal(tensor: Tensor) -> bool:
    least, most = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.equal(least, most)


def compare(name: str) -> dict[str, Any]:
    """Both side by side."""
    case = CASES[name]
    torch.manual_seed(0)
    module = Model(case.branches)
    twin = wrapped(copy.deepcopy(module), case)
    twin.register_comm_hook(dist.group.WORLD, allreduce_hook)  # divides as the hook does
    plain = case.twin(list(twin.parameters()))

    def apply() -> None:
        apply_optimizer_in_backward(
            case.optimizer_class, module.parameters(), case.kwargs, case.register_hook
        )

    if case.when == "before":
        apply()
    ours = wrapped(module, case)
    if case.when == "after":
        apply()
    ours_plain = case.twin(list(ours.parameters()))
    seen: dict[str, Any] = {"same": [], "none": [], "kept": [], "equal": [], "moved": []}
    for iteration in range(4):
        before = copy.deepcopy(module)
        if case.when == "late" and iteration == 2:
            ours_plain.zero_grad()
            apply()
            plain = case.twin(list(twin.parameters()))  # state begins anew, as ours does
        backward(ours, iteration, case.parts)
        backward(twin, iteration, case.parts)
        if case.when == "late" and iteration < 2:
            ours_plain.step()
            ours_plain.zero_grad()
        plain.step()
        plain.zero_grad()
        seen["same"].append(same(ours, twin))
        seen["none"].append(all(param.grad is None for param in ours.parameters()))
        seen["equal"].append(equal_on_all_ranks(module))
        seen["moved"].append(not same(before, module))
        optimizers = 0 if case.when == "late" and iteration < 2 else len(list(module.parameters()))
        seen["kept"].append(len(get_in_backward_optimizers(module)) == optimizers)
    return {key: all(values) for key, values in seen.items()}


def ignored() -> dict[str, bool]:
    """What DDP ignores steps on this rank's gradient, the rest on the mean."""
    torch.manual_seed(0)
    module = Model(False)
    names = ["layers.1.weight", "conv.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    twin_module = copy.deepcopy(module)
    twin = DistributedDataParallel(twin_module)
    twin.register_comm_hook(dist.group.WORLD, allreduce_hook)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ours = DistributedDataParallel(module)
    for iteration in range(3):
        backward(ours, iteration, 1)
        backward(twin, iteration, 1)
        plain.step()
        plain.zero_grad()
    left = dict(module.named_parameters())
    return {
        "same": same(ours, twin),
        "none": all(param.grad is None for param in ours.parameters()),
        "local ones differ": not _equal(left["layers.1.weight"]),
        "others are equal": _equal(left["layers.0.weight"]) and _equal(left["layers.1.bias"]),
    }


def stacked() -> dict[str, bool]:
    """Two optimizers each, the second applied after some iterations; a sparse gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, WIDTH, sparse=True), nn.Linear(WIDTH, 3))
    twin = DistributedDataParallel(copy.deepcopy(module))
    twin.register_comm_hook(dist.group.WORLD, allreduce_hook)
    first = torch.optim.SGD(twin.parameters(), lr=0.1)
    second = torch.optim.SGD(twin.parameters(), lr=0.02)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ours = DistributedDataParallel(module)
    right = []
    for iteration in range(4):
        x = torch.tensor([iteration, dist.get_rank() + 3])
        if iteration == 2:
            apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.02})
        for one in (ours, twin):
            one(x).square().mean().backward()
        first.step()
        if iteration >= 2:
            second.step()
        twin.zero_grad()
        right.append(same(ours, twin))
    return {"same": all(right), "none": all(param.grad is None for param in ours.parameters())}
