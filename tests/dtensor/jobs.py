"""What the ranks do: models whose parameters are DTensors, stepped by ours and by torch's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    export_step,
    sgd,
)
from functional_optim.storage import stored
from hooks import apply_optimizer_in_backward
from sharding import ZeroRedundancyOptimizer

LR, STEPS = 0.1, 4

Step = Callable[[nn.Module], None]
"""Makes a step by the gradients of the module that it was made for."""


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def plain(dtype: torch.dtype) -> nn.Sequential:
    """Sizes that no number of ranks divides; the last bias is on one rank alone."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)]
    for layer in layers:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(param.detach().to(dtype)))
    return nn.Sequential(*layers)


def by_fsdp(dtype: torch.dtype) -> nn.Module:
    """FSDP2, each layer alone."""
    model, over = plain(dtype), mesh()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return model


def by_hand(dtype: torch.dtype) -> nn.Module:
    """Sharded and replicated parameters, without anything that gathers them."""
    model, over = plain(dtype), mesh()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), over, [Shard(1)]))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), over, [Replicate()]))
    return model


MODELS = {"fsdp": by_fsdp, "by hand": by_hand}


def set_gradients(model: nn.Module, step: int, kind: str, *, missing: bool) -> None:
    """The same for a model and its twin; of one parameter None at times."""
    model.zero_grad()
    if kind == "fsdp":
        drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())
        dtype = next(model.parameters()).dtype
        x = torch.randn(3, 4, generator=drawn, dtype=torch.float64).to(dtype)
        model(x).square().sum().backward()
    else:
        for place, param in enumerate(model.parameters()):
            drawn = torch.Generator().manual_seed(100 * step + place)
            full = torch.randn(param.shape, generator=drawn, dtype=torch.float64).to(param.dtype)
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(full, param.device_mesh, param.placements)
    if missing:
        next(model.parameters()).grad = None


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def torch_optimizer(optimizer: Optimizer, model: nn.Module) -> Step:
    made = TorchOptimizer(model.parameters(), optimizer)
    return lambda _: made.step()


def flat(optimizer: Optimizer, model: nn.Module) -> Step:
    made = TorchOptimizer(model.parameters(), optimizer, flat=True)
    return lambda _: made.step()


def bound(optimizer: Optimizer, model: nn.Module) -> Step:
    made = optimizer.bind(dict(model.named_parameters()))
    return lambda _: made.step()


def in_place(optimizer: Optimizer, model: nn.Module) -> Step:
    params = dict(model.named_parameters())
    state = optimizer.init(params)
    return lambda own: optimizer.update_(params, grads_of(own), state)


def pure(optimizer: Optimizer, model: nn.Module) -> Step:
    params = dict(model.named_parameters())
    states = [optimizer.init(params)]

    def step(own: nn.Module) -> None:
        with torch.no_grad():
            new, states[0] = optimizer.update(params, grads_of(own), states[0])
            for name, param in params.items():
                param.copy_(new[name])

    return step


WAYS: dict[str, Callable[[Optimizer, nn.Module], Step]] = {
    "TorchOptimizer": torch_optimizer,
    "flat": flat,
    "bound": bound,
    "update_": in_place,
    "update": pure,
}


class Case(NamedTuple):
    model: str = "fsdp"
    dtype: str = "float32"
    executor: Any = "reference"


def adamw_as_torch(case: dict[str, Any]) -> dict[str, Any]:
    """Each way of stepping, step by step beside torch's AdamW; True where all bits are the same."""
    one = Case(**case)
    found = {}
    for name, way in WAYS.items():
        dtype = getattr(torch, one.dtype)
        ours, twin = MODELS[one.model](dtype), MODELS[one.model](dtype)
        begun = [_local(param).clone() for param in ours.parameters()]
        step = way(adamw(lr=LR).using(executor=one.executor), ours)
        theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
        versions = [param._version for param in ours.parameters()]
        same = True
        for number in range(STEPS):
            for model in (ours, twin):
                set_gradients(model, number, one.model, missing=number == 2)
            step(ours)
            theirs.step()
            same = same and all(
                isinstance(a, DTensor) and torch.equal(_local(a), _local(b))
                for a, b in zip(ours.parameters(), twin.parameters(), strict=True)
            )
        found[name] = same
        found[f"{name}, changed"] = all(
            old.numel() == 0 or not torch.equal(old, _local(param))
            for old, param in zip(begun, ours.parameters(), strict=True)
        )
        found[f"{name}, seen by autograd"] = all(
            param._version > old for old, param in zip(versions, ours.parameters(), strict=True)
        )
    return found


def as_plain_tensors(case: dict[str, Any]) -> dict[str, Any]:
    """Shards are stepped as plain tensors of their values, whatever rounds there."""
    one = Case(**case)
    optimizer, dtype = adamw(lr=LR).using(executor=one.executor), getattr(torch, one.dtype)
    found = {}
    for name, way in WAYS.items():
        model, twin = MODELS[one.model](dtype), plain(dtype)
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        for param, part in pairs:
            part.data = _local(param).clone()
        # Plain tensors would lie in flat buffers, and be packed there in another order.
        apart = {"flat": torch_optimizer, "bound": in_place}.get(name, way)
        steps = way(optimizer, model), apart(optimizer, twin)
        for number in range(STEPS):
            set_gradients(model, number, one.model, missing=number == 2)
            for param, part in pairs:
                part.grad = None if param.grad is None else _local(param.grad)
            steps[0](model)
            steps[1](twin)
        found[name] = all(torch.equal(_local(param), part) for param, part in pairs)
    return found


def checkpoints() -> dict[str, Any]:
    """State is made of DTensors, as torch's, and what torch's class saved is gone on from."""
    ours, twin = by_fsdp(torch.float32), by_fsdp(torch.float32)
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
    before = torch.optim.AdamW(ours.parameters(), lr=LR, foreach=False)
    for model, optimizer in ((ours, before), (twin, theirs)):
        set_gradients(model, 0, "fsdp", missing=False)
        optimizer.step()
    made = TorchOptimizer(ours.parameters(), adamw(lr=LR))
    made.load_state_dict(before.state_dict())
    for model, optimizer in ((ours, made), (twin, theirs)):
        set_gradients(model, 1, "fsdp", missing=False)
        optimizer.step()
    pairs = list(zip(ours.parameters(), twin.parameters(), strict=True))
    return {
        "params": all(torch.equal(_local(a), _local(b)) for a, b in pairs),
        "state": all(
            isinstance(made.state[a][key], DTensor)
            and torch.equal(_local(made.state[a][key]), _local(theirs.state[b][key]))
            for a, b in pairs
            for key in ("exp_avg", "exp_avg_sq")
        ),
    }


def clipped() -> dict[str, Any]:
    """The norm is that of all shards together, as torch's own clipping finds it."""
    ours, twin = by_fsdp(torch.float64), by_fsdp(torch.float64)
    step = torch_optimizer(chain(clip_by_global_norm(0.01), sgd(lr=LR)), ours)
    theirs = torch.optim.SGD(twin.parameters(), lr=LR)
    for model in (ours, twin):
        set_gradients(model, 0, "fsdp", missing=False)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    step(ours)
    theirs.step()
    pairs = zip(ours.parameters(), twin.parameters(), strict=True)
    return {"close": all(torch.allclose(_local(a), _local(b), atol=1e-8) for a, b in pairs)}


def in_backward() -> dict[str, Any]:
    ours, twin = by_fsdp(torch.float32), by_fsdp(torch.float32)
    apply_optimizer_in_backward(adamw, ours.parameters(), {"lr": LR})
    theirs = torch.optim.AdamW(twin.parameters(), lr=LR, foreach=False)
    for number in range(STEPS):
        for model in (ours, twin):
            set_gradients(model, number, "fsdp", missing=False)
        theirs.step()
    pairs = zip(ours.parameters(), twin.parameters(), strict=True)
    return {"same": all(torch.equal(_local(a), _local(b)) for a, b in pairs)}


def refused() -> dict[str, str]:
    """What each thing says that cannot step a shard; nothing is changed by then."""
    model = by_hand(torch.float32)
    set_gradients(model, 0, "by hand", missing=False)
    params, grads = dict(model.named_parameters()), grads_of(model)
    before = {name: _local(param).clone() for name, param in params.items()}
    blocked = adamw(lr=LR).using(executor="blocked")
    clipping = chain(clip_by_global_norm(1.0), sgd(lr=LR)).using(executor="blocked")
    eight = stored(adamw(lr=LR), state="int8").using(executor="blocked")

    def step(optimizer: Optimizer, own: Any = grads) -> None:
        optimizer.update_(params, own, optimizer.init(params))

    def redistributed(grad: Any) -> Any:
        return grad.redistribute(placements=[Replicate()])

    def unsummed(grad: Any) -> Any:
        return grad.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])

    attempts: dict[str, Callable[[], Any]] = {
        "script": lambda: blocked.script(params),
        "export": lambda: export_step(blocked, params),
        "capturable": lambda: adamw().bind(params, capturable=True),
        "zero": lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR),
        "measured": lambda: step(clipping),
        "measure": lambda: clipping.measure(params, grads, clipping.init(params)),
        "blocks": lambda: step(eight),
        "replicated": lambda: step(
            blocked, {**grads, "0.weight": redistributed(grads["0.weight"])}
        ),
        "elsewhere": lambda: step(blocked, {**grads, "0.weight": unsummed(grads["0.weight"])}),
        "plain": lambda: step(blocked, {**grads, "4.bias": torch.ones(1)}),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "nothing was said"
        except ValueError as error:
            found[name] = str(error)
    untouched = all(torch.equal(_local(params[name]), old) for name, old in before.items())
    return {**found, "untouched": str(untouched)}


def twice() -> dict[str, str]:
    """Two DTensors of one shard are seen; all others are not taken for one."""
    param = distribute_tensor(torch.ones(6), mesh(), [Shard(0)])
    again = DTensor.from_local(param.to_local(), param.device_mesh, param.placements)
    optimizer, given = sgd(lr=LR), {"a": param, "b": again}
    try:
        optimizer.update_(given, given, optimizer.init(given))
    except ValueError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()
