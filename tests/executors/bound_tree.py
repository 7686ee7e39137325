"""Tree with a parameter of every kind that matters to flat buffers."""

from typing import Any

import torch

from .support import noise

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (3, 4),
    "b": (7,),
    "c": (),
    "d": (0, 2),
    "e": (2, 3, 4, 5),
    "f": (5, 2),
    "g": (6,),
    "i": (3, 4),
}
DTYPES = {"f": torch.float64, "g": torch.complex64}
NAMES = tuple(SHAPES)


def parameters(seed: int = 0, *, module: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: noise(seed + k, *shape, dtype=DTYPES.get(name, torch.float32))
        for k, (name, shape) in enumerate(SHAPES.items())
    }
    made["e"] = made["e"].contiguous(memory_format=torch.channels_last)
    made["i"] = made["i"].t().contiguous().t()
    made["h"] = None
    made["j"] = noise(seed + 20, 12)[::2]  # not moved to a flat buffer
    if module:
        return {k: None if p is None else torch.nn.Parameter(p) for k, p in made.items()}
    return made


def full(seed: int) -> dict[str, Any]:
    grads = parameters(seed)
    return {**grads, "e": grads["e"].contiguous()}


def some(seed: int, without: frozenset[str]) -> dict[str, Any]:
    return {name: None if name in without else grad for name, grad in full(seed).items()}
