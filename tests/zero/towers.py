"""Models, optimizers and data of the tests: equal models, but different data on each rank."""

import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_optim import (
    Optimizer,
    accumulate,
    adagrad,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    lion,
    schedule_free_adamw,
    sgd,
)
from sharding import ZeroRedundancyOptimizer
from tests.zero_local.compare import differing

# torch's import of its functional optimizers warns that TorchScript is deprecated.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
warnings.filterwarnings("ignore", "You passed find_unused_parameters=true", UserWarning)

Group = dist.ProcessGroup
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "damped": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
AT_ONCE: dict[str, Optimizer] = {
    "accumulated": chain(accumulate(2), adamw(lr=0.01)),
    "finite": chain(apply_if_finite(3), adamw(lr=0.01)),
    "schedule-free": schedule_free_adamw(lr=0.01),
}
"""Optimizers with scalars that are shared by all parameters."""

CHAINS: dict[str, Optimizer] = {
    "sgd": sgd(lr=0.1, momentum=0.9),
    "adamw": adamw(lr=0.01),
    "adagrad": adagrad(lr=0.1),
    "lion": lion(lr=0.01),
    "clipped": chain(clip_by_global_norm(0.01), adamw(lr=0.01)),
    **AT_ONCE,
}
_SEED = threading.Lock()
"""Lock for torch's global random state, which ranks share if they are threads."""


class Tower(nn.Module):
    """Layers of very different sizes; one of them is frozen, and one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, 24)
        self.wide = nn.Linear(24, 301)
        self.frozen = nn.Linear(301, 40)
        self.frozen.requires_grad_(False)
        self.narrow = nn.Linear(40, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.wide(self.embed(x)))
        return self.narrow(torch.tanh(self.frozen(seen))) * self.scale


class Pictures(nn.Module):
    """Layers whose weights are stored in channels_last or transposed order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3)
        self.second = nn.Conv2d(10, 4, 3)
        self.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        seen = self.second(torch.relu(self.first(x)))
        return seen.mean((2, 3)) @ self.turned


KINDS = {"Tower": Tower, "Pictures": Pictures}


def made(kind: type[nn.Module] = Tower) -> nn.Module:
    """Return the same model on every rank."""
    with _SEED:
        torch.manual_seed(0)
        return kind()


def data(kind: type[nn.Module], rank: int, step: int) -> Tensor:
    """Return the input of one rank in one step."""
    chance = torch.Generator().manual_seed(100 * step + rank)
    if kind is Pictures:
        return torch.randn(2, 3, 8, 8, generator=chance)
    return torch.randint(0, 67, (5,), generator=chance)


def groups_of(module: nn.Module, option: str = "lr") -> list[dict[str, Any]]:
    """Return two groups with parameter names; the second has its own value of the option."""
    named = list(module.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1]},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], option: 0.03},
    ]


def gradients(params: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return gradients that are equal on all ranks, as after a reduction."""
    chance = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(param.shape, generator=chance, dtype=torch.float64).to(param.dtype)
        for name, param in params.items()
    }


def give(zero: ZeroRedundancyOptimizer, step: int) -> None:
    """Set the gradients of one step."""
    grads = gradients(zero.params, step)
    for name, param in zero.params.items():
        param.grad = grads[name] if param.requires_grad else None


def tower(
    name: str, group: Group | None = None, policy: str = "greedy", views: bool = False
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """Return a new model and a sharded optimizer over it."""
    cls, options = CLASSES[name]
    module = made(Tower)
    zero = ZeroRedundancyOptimizer(
        groups_of(module), cls, group, views, policy=policy, executor="blocked", **options
    )
    return module, zero


def plain(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer over the same groups."""
    cls, options = CLASSES[name]
    return cls(groups_of(module), foreach=False, **options)


def both(
    zero: ZeroRedundancyOptimizer,
    other: torch.optim.Optimizer,
    theirs: nn.Module | dict[str, nn.Parameter],
    steps: range,
) -> None:
    """Step a sharded and a plain optimizer, and check that the parameters stay equal."""
    if isinstance(theirs, nn.Module):
        theirs = dict(theirs.named_parameters())
    for step in steps:
        give(zero, step)
        for name, param in theirs.items():
            grad = zero.params[name].grad
            param.grad = None if grad is None else grad.clone()
        zero.step()
        other.step()
        assert differing({name: zero.params[name] for name in theirs}, theirs) == [], step


class Halving(torch.optim.Optimizer):
    """Optimizer without a functional equivalent, whose state is not only tensors."""

    def __init__(self, params: Any, lr: float = 0.1, tricks: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(params, {"lr": lr, "tricks": tricks})

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["mean"] = 0.5 * state.get("mean", 0) + param.grad
                    state["log"] = [*state.get("log", []), {"scale": scale, "step": None}]
                    with torch.no_grad():
                        param.sub_(state["mean"], alpha=group["lr"] * scale)
        return loss


def raised(function: Any, *arguments: Any, **named: Any) -> str:
    """Return the error of a call as ``Type: text``, including an interrupt."""
    try:
        function(*arguments, **named)
    except BaseException as error:  # noqa: BLE001  the test says which it should be
        return f"{type(error).__name__}: {error}"
    return "nothing"
