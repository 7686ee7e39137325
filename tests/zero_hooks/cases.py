"""Cases that are compared with one process bit for bit."""

from functools import partial

import torch
from torch import Tensor, nn

from functional_optim import (
    adagrad,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    prodigy,
    schedule_free_adamw,
    sgd,
)
from sharding import sliced
from tests.ddp import models

from .runs import KINDS, Case

WIDTH = models.WIDTH
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
MIXED = partial(models.Tower, [F32, F64, BF16, F32, BF16])
SGD = sgd(lr=0.1, momentum=0.9, weight_decay=0.01)
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}


class Images(nn.Module):
    """Convolutions in channels_last layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, WIDTH, 2))
        self.layers.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        image = x.view(len(x), 4, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.layers(image).flatten(1) * self.scale


class Wide(nn.Module):
    """Model with parameters large enough for a message each, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 1500)
        self.norm = nn.LayerNorm(1500)
        self.down = nn.Linear(1500, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.down(self.norm(self.up(x)).tanh())


class Attention(nn.Module):
    """Model with an attention that reads the weight of its out_proj, but never calls out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        x = self.into(x).unsqueeze(1)
        return self.out(self.attention(x, x, x, need_weights=False)[0].squeeze(1))


class Lonely(nn.Module):
    """Model with one parameter, fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return x @ self.weight


CASES: dict[str, Case] = {
    "tower": Case(),
    "wide": Case(model=Wide),
    "attention": Case(model=Attention),
    "mixed dtypes": Case(model=MIXED),
    "tied": Case(optimizer=SGD, model=models.Tied),
    "unused": Case(model=models.Branches, ddp=UNUSED, iterations=5),
    "unused, static graph": Case(model=models.FixedBranches, ddp=STATIC),
    "static graph, mixed dtypes, clip in the chain": Case(
        optimizer=chain(clip_by_global_norm(0.05), SGD),
        model=partial(models.Tower, [F64, F32, F64, F32]),
        ddp=STATIC,
    ),
    "channels_last": Case(model=Images),
    "complex": Case(model=models.Complex, optimizer=adagrad(lr=0.05)),
    "clip in the chain": Case(optimizer=chain(clip_by_global_norm(0.05), SGD)),
    "schedule-free, unused": Case(
        optimizer=schedule_free_adamw(lr=0.01), model=models.Branches, ddp=UNUSED, iterations=5
    ),
    "apply_if_finite, mixed dtypes": Case(optimizer=chain(apply_if_finite(5), SGD), model=MIXED),
    "prodigy": Case(optimizer=chain(clip_by_global_norm(0.05), prodigy(1.0, d0=1e-2))),
    "max_norm": Case(
        optimizer=SGD,
        oracle=chain(clip_by_global_norm(0.05), SGD),
        hook={"max_norm": 0.05},
    ),
}
"""Cases by name: mainly modules that tests/zero_drawn does not draw."""
NOT_CUT = (
    "tied",
    "attention",
    "prodigy",
    "max_norm",
    "static graph, mixed dtypes, clip in the chain",
)


def variants(name: str) -> list[Case]:
    """Return the case with each hook, and with some policies that cut parameters."""
    base = CASES[name]
    # Inner hooks are compared by .grad, which max_norm has already scaled.
    kinds = KINDS if name != "max_norm" else ("scatter",)
    found = [base._replace(kind=kind) for kind in kinds]
    if name not in NOT_CUT:
        found += [
            base._replace(kind="scatter", policy="elements"),
            base._replace(kind="interleaved", policy=partial(sliced, least=2, align=1, mixed=True)),
        ]
    return found
