"""Jobs of ranks over NCCL, each with different data."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from functional_optim import TorchOptimizer, sgd
from hooks import PeriodicModelAverager, PostLocalSGDOptimizer
from sharding import ZeroRedundancyOptimizer
from sharding.transport import gather_group, make_transport
from tests.ddp import comparison, models, twins
from tests.ddp.cases import CASES as HOOKED
from tests.transport.buffers import CUTS, gradient, same
from tests.zero_hooks.cases import CASES, SGD
from tests.zero_hooks.runs import compare

AVERAGERS: dict[str, Any] = {
    "periodic": lambda group: PeriodicModelAverager(period=2, process_group=group),
}


def group_on_devices(members: Sequence[int] | None = None, backend: str = "nccl") -> Any:
    """Return a group whose CUDA tensors go over NCCL, and set this rank's device.

    NCCL refuses two ranks on one device of a host, so each rank pretends to be a separate host.
    """
    os.environ["NCCL_HOSTID"] = f"rank {dist.get_rank()}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return dist.new_group(None if members is None else list(members), backend=backend)


def sums(cases: Sequence[dict[str, Any]], n: int = 1009) -> dict[str, list[str]]:
    """Compare reduce_scatter and all_gather with sums of one process; return the errors by case."""
    transport: Any = make_transport(group_on_devices(), "cuda")
    gathers = make_transport(gather_group(transport.group), "cuda")
    wrong = {str(one): _sum(transport, gathers, n=n, **one) for one in cases}
    return {name: found for name, found in wrong.items() if found}


def _sum(transport: Any, gathers: Any, *, n: int, dtype: str, cut: str, average: bool) -> list[str]:
    rank, size = transport.rank, transport.size
    kind = getattr(torch, dtype)
    ranges = CUTS[cut](n, size)
    terms = [gradient(q, n, kind) for q in range(size)]
    exact = torch.stack([term.to(torch.complex128) for term in terms]).sum(0)
    exact = exact / size if average else exact
    largest = torch.stack([term.abs().double() for term in terms]).sum(0)
    flat = terms[rank].cuda()
    for launch in (
        partial(transport.reduce_scatter, flat, ranges, average=average),
        partial(gathers.all_gather, flat, ranges),
    ):
        launch().wait()
    got = flat.cpu()
    gaps = torch.ones(n, dtype=torch.bool)
    for start, stop in ranges:
        gaps[start:stop] = False
    apart = (got.to(torch.complex128) - exact).abs()
    room = 2 * size * torch.finfo(kind).eps * largest
    right = {"sums": bool((apart <= room)[~gaps].all()), "gaps": same(got[gaps], terms[rank][gaps])}
    return [name for name, well in right.items() if not well]


def zero_hook(name: str, kind: str, policy: str, members: Sequence[int] | None) -> Any:
    """Compare a ZeRO hook with one process on the same device."""
    group = group_on_devices(members)
    if members is not None and dist.get_rank() not in members:
        return None
    case = CASES[name]
    made = case._replace(kind=kind, policy=policy, model=partial(on_device, case.model))
    if name == "mixed dtypes":  # SGD's steps differ as little as the gradients do
        made = made._replace(optimizer=SGD)
    return compare(made, group)


def on_device(model: Any) -> nn.Module:
    """Return a model on the current device, with the parameters that it has on the CPU."""
    made: nn.Module = model().cuda()
    return made


def hook_beside_torch(name: str, executor: str, members: Sequence[int] | None) -> Any:
    """Compare ``step_hook`` with torch.optim in its for-loop."""
    group = group_on_devices(members)
    if members is not None and dist.get_rank() not in members:
        return None
    case = HOOKED[name]
    made = case._replace(model=partial(on_device, case.model), executor=executor)
    return twins.compare(made, group)


def zero_alone(name: str, policy: str, backend: str) -> dict[str, Any]:
    """Compare a ZeRO optimizer without a hook with a twin in which every rank steps everything."""
    group = group_on_devices(backend=backend)
    case = CASES[name]
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(on_device(case.model))
    ours, theirs = (twins.wrapped(one, group, case.ddp) for one in modules)
    params = dict(theirs.module.named_parameters())
    zero = ZeroRedundancyOptimizer(
        ours.module.named_parameters(), case.optimizer, process_group=group, policy=policy
    )
    with torch.no_grad():
        state = case.optimizer.init(params)
    for number in range(4):
        for one in (ours, theirs):
            one.zero_grad()
            twins.backward(one, number)
        zero.step()
        grads = {key: param.grad for key, param in params.items()}
        with torch.no_grad():
            case.optimizer.update_(params, grads, state)
    apart = [
        float((a - b).detach().abs().max() / b.detach().abs().max())
        for a, b in zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    ]
    zero.consolidate_state_dict(to=0)
    saved = zero.state_dict() if dist.get_rank() == 0 else {"state": {}}
    return {
        "apart": max(apart),
        "digest": comparison.digest(ours.module.parameters()),
        "saved": len(saved["state"]),
        "params": len(params),
    }


def averaged(kind: str) -> dict[str, Any]:
    """Average parameters over NCCL, and return a digest of the parameters after each step."""
    group = group_on_devices()
    torch.manual_seed(dist.get_rank())
    module = on_device(models.Tower)
    with torch.no_grad():
        for param in module.parameters():
            dist.broadcast(param, 0, group=group)
    inner = TorchOptimizer(module.parameters(), sgd(lr=0.1, momentum=0.9))
    averager = AVERAGERS[kind](group)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    digests = []
    for number in range(4):
        optimizer.zero_grad()
        twins.loss_of(module, dist.get_rank(), number).backward()
        optimizer.step()
        digests.append(comparison.digest(module.parameters()))
    return {"digests": digests}
