"""Reads and marks of many tensors, by loops in C: gradients, kinds, and autograd's versions."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.native import LOOPS

DTYPE = attrgetter("dtype")
SHAPE = attrgetter("shape")
DEVICE = attrgetter("device")
IS_LEAF = attrgetter("is_leaf")
_GRAD = attrgetter("grad")


class Kinds(NamedTuple):
    """Shapes, dtypes and devices of tensors, in their order."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[torch.device]


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Return the shapes, dtypes and devices of tensors. No Python runs per tensor."""
    return Kinds(list(map(SHAPE, tensors)), list(map(DTYPE, tensors)), list(map(DEVICE, tensors)))


def mark_changed(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that tensors were written to."""
    loops = LOOPS.loaded or LOOPS.get(len(tensors))
    if loops is None:
        torch.autograd.graph.increment_version(tensors)
    else:
        loops.bump(tensors if isinstance(tensors, list) else list(tensors))


def grads_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the ``.grad`` of each tensor."""
    loops = LOOPS.loaded or LOOPS.get(len(tensors))
    every = tensors if isinstance(tensors, list) else list(tensors)
    found = None if loops is None else loops.grads(every)
    return list(map(_GRAD, tensors)) if found is None else found


def mask_of(gradients: Sequence[Any]) -> bytes | None:
    """Return which gradients are present, as bytes; None if all are."""
    if LOOPS.loaded is not None:
        every = gradients if isinstance(gradients, list) else list(gradients)
        return LOOPS.loaded.mask(every)
    if type(None) in map(type, gradients):
        return bytes([one is not None for one in gradients])
    return None
