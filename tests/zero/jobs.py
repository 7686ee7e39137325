"""What the ranks do, beside torch's own class and beside one process of the pure core."""

import functools
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    Optimizer,
    adagrad,
    adamw,
    chain,
    clip_by_global_norm,
    if_any,
    lion,
    sgd,
)
from sharding import ZeroRedundancyOptimizer

from .models import Pictures, Tower, data, gradients, made, mixed_params

# torch deprecates its own TorchScript; importing its class says so.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
warnings.filterwarnings("ignore", "You passed find_unused_parameters=true", UserWarning)

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "damped": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
CHAINS: dict[str, Optimizer] = {
    "sgd": sgd(lr=0.1, momentum=0.9),
    "adamw": adamw(lr=0.01),
    "adagrad": adagrad(lr=0.1),
    "lion": lion(lr=0.01),
    "clipped": chain(clip_by_global_norm(0.01), adamw(lr=0.01)),
}


def policy_named(name: str) -> Any:
    """A policy, with its options where it has some."""
    if name == "hierarchical":
        from sharding.policies import hierarchical

        return functools.partial(hierarchical, node_size=2, within="elements")
    return name


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups with names, the second with options of its own."""
    named = list(module.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1]},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "lr": 0.03},
    ]


class Beside(NamedTuple):
    """A sharded run, and what one process made of the same gradients."""

    zero: ZeroRedundancyOptimizer
    twin: dict[str, Tensor]
    state: Any
    optimizer: Optimizer


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, strides apart."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = (tensor.reshape(-1).contiguous() for tensor in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def differing(params: dict[str, Tensor], twin: dict[str, Tensor]) -> list[str]:
    """The names of what is not the same."""
    return [name for name, param in params.items() if not same(param.detach(), twin[name].detach())]


def digest(params: dict[str, Tensor]) -> str:
    """Of the values, to compare ranks by."""
    import hashlib

    found = hashlib.sha256()
    for param in params.values():
        real = param.detach()
        real = torch.view_as_real(real) if real.is_complex() else real
        found.update(bytes(real.contiguous().reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


def twin_of(
    zero: ZeroRedundancyOptimizer, optimizer: Optimizer
) -> tuple[dict[str, Tensor], Optimizer]:
    """Copies of the parameters, and the optimizer with the options of each group."""
    groups = {}
    for group in zero.param_groups:
        for param in group["params"]:
            groups[id(param)] = group
    twin = {name: param.detach().clone() for name, param in zero.params.items()}
    for name, param in zero.params.items():
        lr = groups[id(param)]["lr"]
        if lr != optimizer.hyper["lr"]:
            optimizer = optimizer.override(if_any((name,)), lr=lr)  # it may be frozen
    return twin, optimizer


def beside_core(
    chain_name: str, policy: str, views: bool, kind: str = "Tower", steps: int = 4
) -> dict[str, Any]:
    """Train under DDP with other data on every rank; after every step, what one process gets."""
    model = {"Tower": Tower, "Pictures": Pictures}[kind]
    ddp = DistributedDataParallel(made(model), find_unused_parameters=True, bucket_cap_mb=0.02)
    optimizer = CHAINS[chain_name]
    zero = ZeroRedundancyOptimizer(
        groups_of(ddp.module),
        optimizer,
        parameters_as_bucket_view=views,
        policy=policy_named(policy),
    )
    twin, stepper = twin_of(zero, optimizer)
    trained = {name: p for name, p in twin.items() if zero.params[name].requires_grad}
    state = stepper.init(trained)
    wrong: list[str] = []
    before = digest(zero.params)
    for step in range(steps):
        ddp(data(model, dist.get_rank(), step)).square().sum().backward()
        grads = {name: zero.params[name].grad for name in trained}
        grads = {name: None if g is None else g.clone() for name, g in grads.items()}
        zero.step()
        trained, state = stepper.update(trained, grads, state)
        wrong += [f"step {step}: {name}" for name in differing(params_of(zero, trained), trained)]
        zero.zero_grad()
    return {
        "wrong": wrong,
        "changed": digest(zero.params) != before,
        "digest": digest(zero.params),
        "far": far(params_of(zero, trained), trained),
        "grads": [name for name, param in zero.params.items() if param.grad is not None],
    }


def params_of(zero: ZeroRedundancyOptimizer, like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: zero.params[name] for name in like}


def far(params: dict[str, Tensor], twin: dict[str, Tensor]) -> float:
    """The largest difference, in units of the last place of the largest magnitude."""
    worst = 0.0
    for name, param in params.items():
        if param.numel():
            unit = torch.finfo(param.dtype).eps * float(param.detach().abs().max())
            worst = max(worst, float((param.detach() - twin[name]).abs().max()) / unit)
    return worst


def mixed(chain_name: str, policy: str, views: bool) -> dict[str, Any]:
    """Several dtypes at once; some parameters without a gradient at some steps."""
    params = mixed_params()
    zero = ZeroRedundancyOptimizer(
        list(params.items()),
        CHAINS[chain_name],
        parameters_as_bucket_view=views,
        policy=policy_named(policy),
    )
    twin = {name: param.detach().clone() for name, param in params.items()}
    state = CHAINS[chain_name].init(twin)
    wrong = []
    for step in range(4):
        grads: dict[str, Any] = gradients(params, step)
        grads = {n: None if (i + step) % 4 == 0 else g for i, (n, g) in enumerate(grads.items())}
        for name, param in params.items():
            param.grad = None if grads[name] is None else grads[name].clone()
        zero.step()
        twin, state = CHAINS[chain_name].update(twin, grads, state)
        wrong += [f"step {step}: {name}" for name in differing(params, twin)]
    return {"wrong": wrong, "digest": digest(params)}


def beside_torch(name: str, views: bool, groups: bool) -> dict[str, Any]:
    """The default policy: torch's partition, parameters, state dict and options."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    cls, options = CLASSES[name]
    ours, theirs = (
        DistributedDataParallel(made(Tower), find_unused_parameters=True) for _ in range(2)
    )

    def parameters(module: nn.Module) -> Any:
        found = groups_of(module)
        plain = [{**g, "params": [p for _, p in g["params"]]} for g in found]
        return plain if groups else list(module.parameters())

    zero = ZeroRedundancyOptimizer(
        parameters(ours.module), cls, parameters_as_bucket_view=views, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch's own cannot have more than one group with bucket views.
        other = TorchZero(
            parameters(theirs.module),
            cls,
            parameters_as_bucket_view=views,
            foreach=False,
            **options,
        )
    rank = dist.get_rank()
    for step in range(4):
        for ddp, optimizer in ((ours, zero), (theirs, other)):
            ddp(data(Tower, rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = dict(ours.module.named_parameters()), dict(theirs.module.named_parameters())
    names = {id(p): n for n, p in theirs.module.named_parameters()}
    mine = {id(p): n for n, p in ours.module.named_parameters()}
    partition = [
        sorted(names[id(p)] for group in part for p in group["params"])
        for part in other._partition_parameters()
    ]
    own = [
        sorted(mine[id(zero.params[one.path])] for one in zero.plan.owned(r))
        for r in range(dist.get_world_size())
    ]
    zero.consolidate_state_dict(to=0)
    other.consolidate_state_dict(to=0)
    return {
        "wrong": differing(*pairs),
        "partition": own == partition,
        "groups": [len(g["params"]) for g in zero.optim.param_groups]
        == [len(g["params"]) for g in other.optim.param_groups],
        "state": difference(zero.state_dict(), other.state_dict()) if rank == 0 else [],
    }


def difference(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two state dicts are not the same, foreach apart."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if same(one, other) else [f"{at}: {one.dtype} {other.dtype} values"]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if key != "foreach"]
        odd = [f"{at}.{key} only once" for key in keys if (key in one) != (key in other)]
        return odd + [
            text
            for key in keys
            if key in one and key in other
            for text in difference(one[key], other[key], f"{at}.{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in difference(*pair, f"{at}[{i}]")]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]
