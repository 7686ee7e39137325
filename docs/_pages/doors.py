"""Ways to run an optimizer, each tried with two steps on a small model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    export_step,
    hutchinson,
    leaf_paths,
    stored,
)
from functional_optim.storage import mapped_state
from hooks import apply_optimizer_in_backward, step_hook, zero_step_hook
from hooks.in_backward import get_in_backward_optimizers
from sharding import MatrixOwnerOptimizer, ZeroRedundancyOptimizer

STEPS = 2
INPUTS = torch.tensor([[0.5, -1, 2], [1, 0.25, -0.5], [-1.5, 0.5, 1], [0.25, 2, -1]])
"""Four rows for square matrices, whose gradients then have full rank. Otherwise rounding decides
the eigenvectors of ``soap`` for the eigenvalue 0."""

Values = dict[str, Tensor]


class Kind(NamedTuple):
    """A kind of optimizer: a row of the table."""

    name: str
    build: Callable[[], Optimizer]
    inputs: bool = False
    tolerance: float = 1e-5


class Door(NamedTuple):
    """A way to run an optimizer: a column of the table."""

    name: str
    code: str
    run: Callable[[Kind], Values | None]


def model() -> torch.nn.Module:
    """Return the same small model at every call."""
    made = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with torch.no_grad():
        for index, param in enumerate(made.parameters()):
            values = torch.arange(param.numel(), dtype=torch.float32)
            param.copy_(torch.cos(values.square() + index).reshape(param.shape) / 2)
    return made


def loss_of(module: torch.nn.Module, params: Values | None = None) -> Tensor:
    """Return the loss of a model, with other parameters if given."""
    given = (INPUTS,)
    out: Tensor
    out = module(*given) if params is None else torch.func.functional_call(module, params, given)
    return out.square().mean()


def values_of(module: torch.nn.Module) -> Values:
    """Return copies of the parameters by name."""
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def _extra(kind: Kind, module: torch.nn.Module, params: Values | None = None) -> dict[str, Any]:
    """Return the argument ``extra`` of a step, the same at the same parameters."""
    if not kind.inputs:
        return {}
    torch.manual_seed(0)
    at = values_of(module) if params is None else params
    _, hessian = hutchinson(lambda given: loss_of(model(), given), at)
    return {"extra": {"hessian": hessian}}


def _gradients(module: torch.nn.Module, params: Values) -> Values:
    return torch.func.grad(lambda given: loss_of(module, given))(params)  # type: ignore[no-any-return]  a module's call is Any


def update(kind: Kind) -> Values:
    """Run the pure function."""
    module, optimizer = model(), kind.build()
    params = values_of(module)
    state = optimizer.init(params)
    for _ in range(STEPS):
        extra = _extra(kind, module, params)
        params, state = optimizer.update(params, _gradients(module, params), state, **extra)
    return params


def _torch_like(kind: Kind) -> Values:
    module = model()
    optimizer = TorchOptimizer(module.named_parameters(), kind.build())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step(**_extra(kind, module))
    return values_of(module)


def _bind(kind: Kind) -> Values:
    module = model()
    bound = kind.build().bind(dict(module.named_parameters()))
    for _ in range(STEPS):
        module.zero_grad()
        loss_of(module).backward()
        bound.step(**_extra(kind, module))
    return values_of(module)


def _script(kind: Kind) -> Values:
    module = model()
    params = values_of(module)
    scripted = kind.build().script(params)
    for _ in range(STEPS):
        gradients = _gradients(module, params)
        scripted.step([gradients[name] for (name,) in leaf_paths(params)], **_extra(kind, module))
    return params


def _export(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export_step(kind.build(), values_of(model()), Path(folder) / "step.pt2")


def _stored(kind: Kind) -> None:
    module = model()
    optimizer = TorchOptimizer(module.named_parameters(), stored(kind.build(), state="bfloat16"))
    loss_of(module).backward()
    optimizer.step(**_extra(kind, module))


def _mapped(kind: Kind) -> Values:
    module, optimizer = model(), kind.build()
    params = values_of(module)
    with tempfile.TemporaryDirectory() as folder:
        state = mapped_state(optimizer, params, folder)
        for _ in range(STEPS):
            gradients = _gradients(module, params)
            optimizer.update_(params, gradients, state, **_extra(kind, module))
    return params


def _replicas(kind: Kind) -> Values:
    """Step by vmap: each of two replicas has the same values."""
    module, optimizer = model(), kind.build()

    def doubled(values: Values) -> Values:
        return {name: one.expand(2, *one.shape).clone() for name, one in values.items()}

    def step(params: Values, state: Any, extra: dict[str, Any]) -> Any:
        return optimizer.update(params, _gradients(module, params), state, **extra)

    params = doubled(values_of(module))
    state = torch.func.vmap(optimizer.init)(params)
    for _ in range(STEPS):
        extra = _extra(kind, module, {name: one[0] for name, one in params.items()})
        given = {k: {"hessian": doubled(one["hessian"])} for k, one in extra.items()}
        params, state = torch.func.vmap(step)(params, state, given)
    return {name: one[0] for name, one in params.items()}


def _step_hook(kind: Kind) -> Values:
    module = model()
    ddp = DistributedDataParallel(module)
    state = step_hook(ddp, kind.build())
    for _ in range(STEPS):
        loss_of(ddp).backward()
        state.zero_grad()
    return values_of(module)


def _zero(kind: Kind) -> Values:
    module = model()
    optimizer = ZeroRedundancyOptimizer(module.named_parameters(), kind.build())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step(**_extra(kind, module))
    return values_of(module)


def _zero_hook(kind: Kind) -> Values:
    module = model()
    ddp = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(
        module.named_parameters(), kind.build(), overlap_with_ddp=True
    )
    ddp.register_comm_hook(None, zero_step_hook(ddp, optimizer))
    for _ in range(STEPS):
        loss_of(ddp).backward()
        optimizer.zero_grad()
    return values_of(module)


def _in_backward(kind: Kind) -> Values:
    module = model()
    apply_optimizer_in_backward(kind.build(), module.named_parameters(), {}, ddp=False)
    try:
        for _ in range(STEPS):
            loss_of(module).backward()
    finally:
        get_in_backward_optimizers(module)
    return values_of(module)


def _workers(kind: Kind) -> Values:
    module = model()
    names = [name for name, _ in module.named_parameters()]
    where = {name: f"worker{index % 2}" for index, name in enumerate(names)}
    optimizer = DistributedOptimizer.over_threads(kind.build(), module, where)
    try:
        for _ in range(STEPS):
            optimizer.step(list(_gradients(module, values_of(module)).values()))
        return values_of(module)
    finally:
        optimizer.close()


def _fully_sharded(
    kind: Kind, front_end: Callable[..., torch.optim.Optimizer] = TorchOptimizer
) -> Values:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  it takes a while to import
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: PLC0415

    mesh = dist.init_device_mesh("cpu", (1,))
    module = model()
    fully_shard(module, mesh=mesh)
    optimizer: Any = front_end(module.named_parameters(), kind.build())

    def whole() -> Values:
        found = values_of(module)
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}

    for _ in range(STEPS):
        extra = _extra(kind, module, whole())
        for one in extra.values():
            for name, value in one["hessian"].items():
                one["hessian"][name] = distribute_tensor(value, mesh, [Shard(0)])
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step(**extra)
    return whole()


def _owned_matrices(kind: Kind) -> Values:
    return _fully_sharded(kind, MatrixOwnerOptimizer)


ALONE = (
    Door("TorchOptimizer", "TorchOptimizer(model.named_parameters(), optimizer)", _torch_like),
    Door("bind", "optimizer.bind(params)", _bind),
    Door("script", "optimizer.script(params)", _script),
    Door("export", "export_step(optimizer, params, path)", _export),
    Door("stored", 'stored(optimizer, state="bfloat16")', _stored),
    Door("mapped", "mapped_state(optimizer, params, folder)", _mapped),
    Door("vmap", "torch.func.vmap(optimizer.update)", _replicas),
)
"""Ways that need one process."""

ON_RANKS = (
    Door("step_hook", "step_hook(ddp, optimizer)", _step_hook),
    Door("ZeRO", "ZeroRedundancyOptimizer(..., optimizer)", _zero),
    Door("zero_step_hook", "zero_step_hook(ddp, zero)", _zero_hook),
    Door("in backward", "apply_optimizer_in_backward(optimizer, ...)", _in_backward),
    Door("workers", "DistributedOptimizer.over_threads(...)", _workers),
    Door("FSDP2", "TorchOptimizer on the parameters of fully_shard", _fully_sharded),
    Door("FSDP2, owners", "MatrixOwnerOptimizer on the same parameters", _owned_matrices),
)
"""Ways that step during backward, or that several ranks or workers share."""

DOORS = (*ALONE, *ON_RANKS)
"""All ways to run an optimizer beside ``update``, which takes every optimizer."""
