"""Small models that are difficult for hooks, called as ``model(x, rank, iteration)``."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64
BATCH = 4


class Tower(nn.Module):
    """Tower of layers, each of one dtype."""

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32,) * 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=kind) for kind in dtypes)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


class Checkpointed(Tower):
    """Layers that are computed again in backward, by an inner backward pass."""

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x


class Odd(Tower):
    """Tower with frozen layers, a parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return super().forward(x, rank, iteration) * self.scale + self.nothing.sum()


class Branches(nn.Module):
    """Stem, and branches that are used on some ranks, in some iterations."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("stem", "both", "odd", "only_one", "some", "never", "head"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def used(self, rank: int, iteration: int) -> list[str]:
        """Return the names of the used branches, in order."""
        uses = {
            "both": True,
            "odd": iteration % 2 == 1,
            "only_one": rank == 1,
            "some": rank == 0 and iteration % 3 == 0,
        }
        return [name for name, use in uses.items() if use]

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        x = self.stem(x).tanh()
        for name in self.used(rank, iteration):
            x = x + self.get_submodule(name)(x).tanh()
        return self.head(x)


class FixedBranches(Branches):
    """Branches that never change, as ``static_graph`` requires, but differ between ranks."""

    def used(self, rank: int, iteration: int) -> list[str]:
        return ["both", "only_one"] if rank == 1 else ["both"]


class Tied(nn.Module):
    """Model that uses one weight in three places, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.last(self.middle(self.first(self.first(x).tanh())).tanh())


class Convolutions(nn.Module):
    """Weights and inputs in channels_last layout, and batch normalisation with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, WIDTH, 2)
        ).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        image = x.view(len(x), 4, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.layers(image).flatten(1)


class Complex(nn.Module):
    """Model with a complex layer among real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.phase = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.out((self.into(x).to(torch.complex64) @ self.phase).abs())


class Transposed(nn.Module):
    """Model with a weight that is stored column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.second(self.first(x).tanh())


class Sparse(nn.Module):
    """Embedding with sparse gradients: other rows on every rank, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        rows = (x[:, :7] * 10).long().abs() % 50
        return self.out(self.table(rows).sum(1).tanh())
