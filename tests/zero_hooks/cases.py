"""The table of comparisons with one process, bit for bit."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from functional_optim import adagrad, adamw, chain, clip_by_global_norm, sgd
from sharding import sliced
from tests.ddp import models

from .runs import KINDS, Case, Named, compare

WIDTH = models.WIDTH
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
MIXED = partial(models.Tower, [F32, F64, BF16, F32, BF16])
DOUBLE = partial(models.Tower, [F64] * 5)
ADAMW = adamw(lr=1e-2, weight_decay=0.1)
SGD = sgd(lr=0.1, momentum=0.9, weight_decay=0.01)
CAPS = (1e-4, 0.03, 25)
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}


class Images(nn.Module):
    """Weights in channels_last layout; elements do not lie in the order of the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, WIDTH, 2))
        self.layers.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        image = x.view(len(x), 4, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.layers(image).flatten(1) * self.scale


class Wide(nn.Module):
    """Parameters large enough to travel by themselves, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 1500)
        self.norm = nn.LayerNorm(1500)
        self.down = nn.Linear(1500, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.down(self.norm(self.up(x)).tanh())


class Attention(nn.Module):
    """A module that reads parameters of another one, which is never called (its out_proj)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        x = self.into(x).unsqueeze(1)
        return self.out(self.attention(x, x, x, need_weights=False)[0].squeeze(1))


def two_groups(named: Named) -> list[dict[str, Any]]:
    """Biases apart, with options of their own."""
    biases = [(name, param) for name, param in named.items() if name.endswith("bias")]
    rest = [(name, param) for name, param in named.items() if not name.endswith("bias")]
    return [{"params": rest}, {"params": biases, "lr": 0.1, "weight_decay": 0.0}]


def has_bias(path: Any) -> bool:
    return path[-1].endswith("bias")


BASE: dict[str, Case] = {
    "tower": Case(),
    "sgd": Case(optimizer=SGD),
    "adagrad": Case(optimizer=adagrad(lr=0.05)),
    "wide": Case(model=Wide),
    "attention": Case(model=Attention),
    "two groups": Case(
        groups=two_groups, oracle=ADAMW.override(has_bias, lr=0.1, weight_decay=0.0)
    ),
    "mixed dtypes": Case(model=MIXED),
    "frozen, 0-d, empty": Case(model=models.Odd),
    "tied": Case(optimizer=SGD, model=models.Tied),
    "learning rates": Case(hyper={1: {"lr": 0.05}, 2: {"weight_decay": 0.0}, 3: {"lr": 1e-3}}),
    "no_sync": Case(backwards=2),
    "bucket views": Case(ddp=VIEW),
    "parameters as bucket view": Case(zero={"parameters_as_bucket_view": True}, model=Wide),
    "unused": Case(model=models.Branches, ddp=UNUSED, iterations=5),
    "unused, momentum": Case(optimizer=SGD, model=models.Branches, ddp=UNUSED, iterations=5),
    "all used": Case(ddp=UNUSED),
    "unused, static graph": Case(model=models.FixedBranches, ddp=STATIC),
    "static graph, bucket views": Case(ddp={**STATIC, **VIEW}),
    "static graph, mixed dtypes": Case(model=MIXED, ddp=STATIC),
    "static graph, mixed dtypes, clip in the chain": Case(
        optimizer=chain(clip_by_global_norm(0.05), SGD),
        model=partial(models.Tower, [F64, F32, F64, F32]),
        ddp=STATIC,
    ),
    "channels_last": Case(model=Images),
    "transposed": Case(model=models.Transposed),
    "complex": Case(model=models.Complex, optimizer=adagrad(lr=0.05)),
    "clip in the chain": Case(optimizer=chain(clip_by_global_norm(0.05), SGD), model=DOUBLE),
    "clip in the chain, float32": Case(optimizer=chain(clip_by_global_norm(0.05), SGD)),
    "max_norm": Case(
        optimizer=SGD,
        oracle=chain(clip_by_global_norm(0.05), SGD),
        hook={"max_norm": 0.05},
    ),
}
"""By what is tested. Every hook has to give all of them."""

CASES: dict[str, Case] = {
    f"{name}, {kind}": case._replace(kind=kind)
    for name, case in BASE.items()
    for kind in KINDS
    # What the inner hook gave is read from .grad, where max_norm has scaled it already.
    if not (name == "max_norm" and kind not in ("scatter", "forward"))
}
"""All of them with torch's default partition."""
CASES |= {
    f"{name}, cut, {kind}": CASES[f"{name}, {kind}"]._replace(policy="elements")
    for name in (
        "tower",
        "wide",
        "mixed dtypes",
        "frozen, 0-d, empty",
        "unused",
        "two groups",
        "complex",
        "parameters as bucket view",
        "channels_last",
        "clip in the chain, float32",
    )
    for kind in KINDS
}
SLICED = partial(sliced, least=2, align=1)
CASES |= {
    f"{name}, sliced, {kind}": CASES[f"{name}, {kind}"]._replace(policy=SLICED)
    for name in ("tower", "wide", "unused", "clip in the chain, float32")
    for kind in KINDS
}
CASES |= {
    f"{name}, {policy}, {cap} MB, {kind}": CASES[f"{name}, {kind}"]._replace(
        policy=policy, ddp={**CASES[f"{name}, {kind}"].ddp, "bucket_cap_mb": cap}
    )
    for name in ("tower", "wide")
    for policy in ("greedy", "elements")
    for cap in CAPS
    for kind in ("scatter", "forward")
}
CASES |= {
    f"{inner}, {kind}": Case(inner=inner, kind=kind)
    for inner in ("fp16", "list", "copy", "at once")
    for kind in ("held", "interleaved")
}
CASES |= {
    f"power, {kind}": Case(inner="power", kind=kind, hook={"in_order": True}, iterations=5)
    for kind in ("held", "interleaved")
}


def run_case(name: str) -> dict[str, Any]:
    """One comparison, on this rank."""
    return compare(CASES[name])
