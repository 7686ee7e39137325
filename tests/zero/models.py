"""Models of the tests, and their data: other data on every rank."""

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Layers of very different sizes, one that is never trained, and one that is not used."""

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
    """Weights that do not lie in the order of their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3)
        self.second = nn.Conv2d(10, 4, 3)
        self.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        seen = self.second(torch.relu(self.first(x)))
        return seen.mean((2, 3)) @ self.turned


def made(kind: type[nn.Module]) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(0)
    return kind()


def data(kind: type[nn.Module], rank: int, step: int) -> Tensor:
    """Of one rank and one step."""
    chance = torch.Generator().manual_seed(100 * step + rank)
    if kind is Pictures:
        return torch.randn(2, 3, 8, 8, generator=chance)
    return torch.randint(0, 67, (5,), generator=chance)


MIXED = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)


def mixed_params(dtypes: tuple[torch.dtype, ...] = MIXED) -> dict[str, Tensor]:
    """Parameters of several dtypes, empty and 0-d ones too, without a module."""
    chance = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {}
    for dtype in dtypes:
        for shape in ((13, 7), (5,), (), (0, 4), (300, 230)):
            name = f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
            real = torch.randn(shape, generator=chance, dtype=torch.float64)
            found[name] = nn.Parameter(real.to(dtype))
    return found


def gradients(params: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """The same on all ranks, as after a reduction."""
    chance = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(param.shape, generator=chance, dtype=torch.float64).to(param.dtype)
        for name, param in params.items()
    }
