"""Sharded models, the same models in one process, and optimizers for both."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    add_noise,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    ema,
    freeze,
    kl_soap,
    lamb,
    muon,
    partition,
    prodigy,
    sgd,
    shampoo,
    soap,
    weight_decay,
    with_shape,
)
from functional_optim.storage import stored
from sharding import MatrixOwnerOptimizer
from tests.dtensors import gather
from tests.tensors import normal

LR = 0.05


def kind(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    """Return the part of a partition that steps a parameter of a global shape."""
    return "matrices" if len(shape) == 2 and shape[0] > 1 else "rest"


def is_bias(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1


def parts(matrices: Optimizer) -> Optimizer:
    return partition({"matrices": matrices, "rest": adamw(lr=LR)}, kind)


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "muon": lambda: parts(muon(lr=LR)),
    "muon, options": lambda: parts(muon(lr=LR, iteration_dtype="float32")),
    "soap": lambda: parts(soap(lr=LR)),
    "kl_soap": lambda: parts(kl_soap(lr=LR)),
    "shampoo": lambda: parts(shampoo(lr=LR)),
    "lamb": lambda: lamb(lr=LR),
    "clipped": lambda: chain(clip_by_global_norm(0.1), parts(muon(lr=LR))),
    "clipped lamb": lambda: chain(weight_decay(0.1), clip_by_global_norm(0.1), lamb(lr=LR)),
    "clipped within": lambda: parts(chain(clip_by_global_norm(0.1), muon(lr=LR))),
    "accumulated": lambda: chain(accumulate(2), parts(muon(lr=LR))),
    "finite, clipped": lambda: chain(
        apply_if_finite(3), clip_by_global_norm(0.1), parts(muon(lr=LR))
    ),
    "a clip in each part": lambda: partition(
        {
            "matrices": chain(clip_by_global_norm(0.5), muon(lr=LR)),
            "rest": chain(clip_by_global_norm(0.25), adamw(lr=LR)),
        },
        kind,
    ),
    "averaged": lambda: chain(parts(muon(lr=LR)), ema(0.5)),
    "overridden": lambda: lamb(lr=LR).override(with_shape(is_bias), lr=0.01),
    "frozen part": lambda: partition({"matrices": muon(lr=LR), "rest": freeze()}, kind),
    "noise": lambda: chain(add_noise(), sgd(lr=LR)),
    "8 bits": lambda: stored(adamw(lr=LR), state="int8"),
    "prodigy, sliced": lambda: prodigy(1.0, d0=1e-2, slice_p=2),
    "pointwise": lambda: adamw(lr=LR),
}
"""Optimizers that match one process bit for bit, if gradients are equal."""


def plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model whose rows no number of ranks divides; one rank has the whole last layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1)]
    return nn.Sequential(*layers).to(dtype)


class Experts(nn.Module):
    """Model with a stack of matrices, one for each expert, and a router."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(normal(5, 6, 4, seed=1))
        self.router = nn.Linear(4, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router = self.router(x)
        return (torch.einsum("emn,bn->bem", self.up, x) * router[..., None]).sum(-1)


class Tied(nn.Module):
    """Model whose first and last layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.middle = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer with FSDP2."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_as_one(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard all layers together with FSDP2, so that layers can share parameters."""
    return fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


class Pair:
    """Sharded model with its optimizer, and the same in one process.

    Args:
        optimizer: the optimizer of both models.
        mesh: the mesh over which the model is sharded.
        make: creates a model.
        prepare: is called with both models.
        wrap: shards a model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mesh: DeviceMesh,
        make: Callable[[], nn.Module] = plain,
        prepare: Callable[[nn.Module], object] = lambda model: None,
        wrap: Callable[[nn.Module, DeviceMesh], nn.Module] = shard,
    ) -> None:
        self.model, self.twin = wrap(make(), mesh), make()
        for one in (self.model, self.twin):
            prepare(one)
        self.ours = MatrixOwnerOptimizer(self.model.named_parameters(), optimizer)
        self.theirs = TorchOptimizer(self.twin.named_parameters(), optimizer)

    def backward(self, step: int, missing: tuple[str, ...] = ()) -> None:
        """Compute gradients of different data on each rank, and copy their mean to the twin."""
        self.ours.zero_grad()
        drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())
        first = next(self.twin.parameters())
        x = torch.randn(3, first.shape[-1], generator=drawn, dtype=torch.float64).to(first.dtype)
        self.model(x).square().sum().backward()
        for name in missing:
            self.model.get_parameter(name).grad = None
        grads = gather([param.grad for param in self.model.parameters()])
        for param, grad in zip(self.twin.parameters(), grads, strict=True):
            param.grad = grad

    def step(self, step: int, missing: tuple[str, ...] = ()) -> None:
        self.backward(step, missing)
        self.ours.step()
        self.theirs.step()

    def check_params(self) -> None:
        """Check that parameters are those of one process."""
        ours = gather(self.model.parameters())
        for (name, param), one in zip(self.twin.named_parameters(), ours, strict=True):
            assert torch.equal(one, param), name

    def check(self) -> None:
        """Check that parameters and state are those of one process."""
        self.check_params()
        theirs = dict(self.twin.named_parameters())
        owners, rank = self.ours._owners, self.ours._owners.shards.rank
        for name, param in self.model.named_parameters():
            found, wanted = self.ours.state.get(param, {}), self.theirs.state[theirs[name]]
            if found:
                assert found.keys() == wanted.keys(), name
            is_matrix = name in {spec.path for spec in self.ours.plan.specs}
            assert not (is_matrix and found) or name in owners.owned()
            start, stop = owners.shards.rows(param.shape[0])[rank]
            for key, value in found.items():
                other = wanted[key]
                if not is_matrix and other.dim():
                    other = other[start:stop]
                assert torch.equal(value, other), (name, key)


def raised(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  Ctrl-C is raised here, too
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


class Collectives(TorchDispatchMode):
    """Dispatch mode that records the names of all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and "wait" not in name:
            self.names.append(name.split(".")[1])
        return func(*args, **(kwargs or {}))
