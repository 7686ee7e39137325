"""Workloads: lists of shapes in full size, in quick size, and in a size for tests."""

from collections.abc import Callable
from math import prod
from typing import Literal, NamedTuple, get_args

Shape = tuple[int, ...]
Size = Literal["full", "quick", "tiny"]
SIZES: tuple[Size, ...] = get_args(Size)


def gpt2(layers: int, width: int, vocabulary: int, context: int) -> list[Shape]:
    """Return GPT-2 with tied output: two embeddings, twelve tensors a layer, a last norm."""
    layer = [
        *[(width,), (width,)],  # norm before attention
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # norm before the feed-forward part
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return [(vocabulary, width), (context, width), *layer * layers, (width,), (width,)]


def resnet50(width: int, classes: int) -> list[Shape]:
    """Return ResNet-50: bottleneck blocks of 3, 4, 6 and 3, each convolution with its norm."""
    shapes: list[Shape] = []

    def convolution(channels_in: int, channels_out: int, kernel: int) -> None:
        shapes.append((channels_out, channels_in, kernel, kernel))
        shapes.extend([(channels_out,), (channels_out,)])

    convolution(3, width, 7)
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            convolution(channels, inner, 1)
            convolution(inner, inner, 3)
            convolution(inner, 4 * inner, 1)
            if block == 0:
                convolution(channels, 4 * inner, 1)
            channels = 4 * inner
    return [*shapes, (classes, channels), (classes,)]


class Workload(NamedTuple):
    """Workload: a list of shapes in each size, and its properties."""

    name: str
    shapes: dict[Size, Callable[[], list[Shape]]]
    large: bool = False
    """True if memory traffic dominates the time, so that the floor is the measure."""
    many: bool = False
    """True if the number of tensors dominates the time."""

    def numel(self, size: Size) -> int:
        """Return the number of elements of all parameters."""
        return sum(prod(shape) for shape in self.shapes[size]())


def _same(shape: Shape, count: int) -> Callable[[], list[Shape]]:
    return lambda: [shape] * count


GPT2 = "GPT-2 small"
RESNET50 = "ResNet-50"
MANY = "10,000 x 1,000"
ONE = "1 x 50 M"
SMALL_1 = "1 x 100"
SMALL_10 = "10 x 100"
SMALL_100 = "100 x 100"

WORKLOADS: dict[str, Workload] = {
    one.name: one
    for one in (
        Workload(
            GPT2,
            {
                "full": lambda: gpt2(12, 768, 50257, 1024),
                "quick": lambda: gpt2(2, 256, 8000, 256),
                "tiny": lambda: gpt2(1, 8, 20, 8),
            },
            large=True,
        ),
        Workload(
            RESNET50,
            {
                "full": lambda: resnet50(64, 1000),
                "quick": lambda: resnet50(16, 100),
                "tiny": lambda: resnet50(2, 3),
            },
            large=True,
        ),
        Workload(
            MANY,
            {
                "full": _same((1000,), 10_000),
                "quick": _same((1000,), 1000),
                "tiny": _same((10,), 20),
            },
            many=True,
        ),
        Workload(
            ONE,
            {
                "full": _same((50_000_000,), 1),
                "quick": _same((5_000_000,), 1),
                "tiny": _same((1000,), 1),
            },
            large=True,
        ),
        Workload(SMALL_1, {size: _same((100,), 1) for size in SIZES}),
        Workload(SMALL_10, {size: _same((100,), 10) for size in SIZES}),
        Workload(SMALL_100, {size: _same((100,), 100) for size in SIZES}),
    )
}
