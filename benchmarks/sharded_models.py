"""Models of sharded training, and the data of each rank."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that torch's own examples use

from benchmarks.sharded import GPT, LAYERS_10, LAYERS_20
from benchmarks.workloads import Size

Batch = tuple[Tensor, Tensor]
TOKENS = 65
"""Number of different characters, as in a book."""
BROAD = "4 layers"
"""Model for counting sent bytes. It is so large that message headers matter little."""
DEMO = "the demo's"
"""Model that learns something, from text."""


class Task(NamedTuple):
    """Model, its loss, and its data."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    """The mean over the batch, so that the mean over ranks is the mean over all batches."""
    draw: Callable[[torch.Generator], Batch]
    units: Callable[[Any], list[nn.Module]]
    """The parts of the model that FSDP shards separately. The rest is one more part."""

    def model(self) -> nn.Module:
        """Return the model before its first step, the same in every call and on every rank."""
        torch.manual_seed(0)
        return self.make()

    def batch(self, rank: int) -> Batch:
        """Return the batch that a rank trains on in every iteration."""
        return self.draw(torch.Generator().manual_seed(1 + rank))


def _layers(count: int, width: int, samples: int) -> Task:
    """Return the task of linear layers, as in torch's recipe for ZeroRedundancyOptimizer."""

    def draw(generator: torch.Generator) -> Batch:
        inputs, targets = (torch.randn(samples, width, generator=generator) for _ in range(2))
        return inputs, targets

    return Task(
        lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        draw,
        list,
    )


def _decoder(samples: int, context: int, width: int, heads: int, blocks: int) -> Task:
    """Return the task of the demo's transformer on random tokens."""

    def make() -> nn.Module:
        # A late import: who trains the other model by torch alone does not load this package.
        decoder = import_module("hooks.demo.model").Decoder
        found: nn.Module = decoder(TOKENS, context=context, width=width, heads=heads, blocks=blocks)
        return found

    def draw(generator: torch.Generator) -> Batch:
        drawn = torch.randint(TOKENS, (samples, context + 1), generator=generator)
        return drawn[:, :-1], drawn[:, 1:]

    return Task(
        make,
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        draw,
        lambda model: list(model.blocks),
    )


def _demo(samples: int, **options: int) -> Task:
    """Return the task of the demo's transformer on the demo's text."""

    def text() -> Any:
        return import_module("hooks.demo.text")

    def corpus() -> Any:
        with torch.device("cpu"):  # the text is cached, so its device must not be meta
            return text().corpus()

    def make() -> nn.Module:
        decoder = import_module("hooks.demo.model").Decoder
        found: nn.Module = decoder(len(corpus().alphabet), **options)
        return found

    def draw(generator: torch.Generator) -> Batch:
        found: Batch = text().random_batch(corpus().train, samples, options["context"], generator)
        return found

    return _decoder(samples, **options)._replace(make=make, draw=draw)


TASKS: dict[str, dict[Size, Task]] = {
    LAYERS_10: {
        "full": _layers(10, 2000, 20),
        "quick": _layers(10, 500, 20),
        "tiny": _layers(3, 16, 4),
    },
    LAYERS_20: {
        "full": _layers(20, 2000, 20),
        "quick": _layers(20, 500, 20),
        "tiny": _layers(4, 16, 4),
    },
    BROAD: {
        "full": _layers(4, 512, 4),
        "quick": _layers(4, 512, 4),
        "tiny": _layers(4, 128, 4),
    },
    DEMO: {
        "full": _demo(16, context=32, width=192, heads=6, blocks=3),
        "quick": _demo(16, context=32, width=96, heads=4, blocks=3),
        "tiny": _demo(2, context=8, width=16, heads=2, blocks=1),
    },
    GPT: {
        "full": _decoder(4, 32, 384, 6, 6),
        "quick": _decoder(4, 32, 96, 4, 3),
        "tiny": _decoder(2, 8, 16, 2, 1),
    },
}


def numel(model: str, size: Size) -> int:
    """Return the number of elements of a model's parameters."""
    with torch.device("meta"):
        return sum(param.numel() for param in TASKS[model][size].make().parameters())
