"""Comparison of tensors bit by bit: our hook with its twin, and one rank with another."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import LeafState


class Pair(NamedTuple):
    """A tensor of ours, and the tensor of torch that corresponds to it."""

    name: str
    ours: Tensor | None
    torchs: Tensor | None

    @property
    def same(self) -> bool:
        """Return True if every element is equal, or both are None."""
        if self.ours is None or self.torchs is None:
            return self.ours is self.torchs
        return self.ours.dtype == self.torchs.dtype and torch.equal(self.ours, self.torchs)

    @property
    def apart(self) -> float:
        """Return the largest difference, relative to the largest element."""
        if self.same:
            return 0.0
        assert self.ours is not None and self.torchs is not None
        return ((self.ours - self.torchs).abs().max() / self.torchs.abs().max()).item()


def trainable(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters of the wrapped module that require gradients, by name."""
    return {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}


def fields(leaf: LeafState) -> dict[str, Tensor]:
    """Return the tensors of a leaf state by torch's names; options that are off have none."""
    found: dict[str, Tensor] = {}
    for stage in leaf.stages:
        for key in getattr(stage, "_fields", ()):
            value = getattr(stage, key)
            for tensor in value if isinstance(value, list) else [value]:
                found[key] = tensor
    return found


def state_pairs(
    name: str, leaf: LeafState, entries: dict[str, Tensor | None], steps: int
) -> Iterator[Pair]:
    """Yield pairs of our state of a parameter and torch.optim's state, and of step counts."""
    left = {key: value for key, value in entries.items() if value is not None}
    yield Pair(f"{name}: steps", leaf.step, torch.tensor(steps))
    if "step" in left:
        yield Pair(f"{name}: step", leaf.step, left.pop("step").long())
    for key, tensor in fields(leaf).items():
        # torch makes most state at the first step; our state exists from the start, as zeros.
        yield Pair(f"{name}: {key}", tensor, left.pop(key, torch.zeros_like(tensor)))
    for key, tensor in left.items():
        yield Pair(f"{name}: {key}", None, tensor)


def copied(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return copies of the parameters."""
    return {name: param.detach().clone() for name, param in trainable(ddp).items()}


def moved(before: dict[str, Tensor], ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that have changed."""
    return [name for name, param in trainable(ddp).items() if not torch.equal(before[name], param)]


def dense(gradient: Tensor | None) -> Tensor | None:
    """Return a dense gradient, which can be compared."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest that is equal on two ranks only if all bits are."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        total.update(bytes(flat.view(torch.uint8).tolist()))
    return total.hexdigest()


def finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if there is no NaN and no infinity, with which comparisons say nothing."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
