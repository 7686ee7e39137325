"""Checks that the tensors of a checkpoint are those that a rank's state is read from."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from functional_optim.storage.plain import extras_in, parts_of
from functional_optim.storage.state_storage import BLOCK
from sharding.zero.convert import Target, Targets
from sharding.zero.local_shard import LocalShard
from sharding.zero.parts import OptimizerParts
from sharding.zero.restore import SavedState

Shape = tuple[int, ...]


def check_tensors(parts: OptimizerParts, targets: Targets, source: SavedState) -> None:
    """Every tensor that this rank is to read has the shape and the kind of numbers that it needs.

    Args:
        parts: of the optimizer.
        targets: of the parameter groups as they will be.
        source: the checkpoint.

    Raises:
        ValueError: names the first that has not.
    """
    for shard, entries in parts.with_state():
        if shard.path not in source.names or not shard.param.numel():
            continue
        target = targets.of(shard)
        for name, shape, dtype in _wanted(shard, target, entries, source.names[shard.path]):
            saved = source.tensors[f"{shard.path}/{name}"]
            if shape is not None and saved.shape != shape:
                raise ValueError(
                    f"{name} of {shard.path!r} has shape {saved.shape} in the checkpoint, and must "
                    f"have {shape}; it was damaged, or is of another optimizer"
                )
            if _sort(saved.dtype) != _sort(dtype):
                raise ValueError(
                    f"{name} of {shard.path!r} is of {saved.dtype} in the checkpoint, and must be "
                    f"of a dtype like {dtype}; it was damaged, or is of another optimizer"
                )


def _wanted(
    shard: LocalShard, target: Target, entries: Mapping[str, Tensor], names: Sequence[str]
) -> Iterator[tuple[str, Shape | None, torch.dtype]]:
    """(name, shape, dtype) of the tensors of a parameter's state; None for an unknown shape."""
    fields = target.plain.dtypes
    here = parts_of(fields, entries)
    for field, (values, scale) in parts_of(fields, names).items():
        own = entries[here[field].values] if field in here else None
        shape = _shape_of(shard, target, field, own)
        if scale is None:
            yield values, shape, fields[field]
            continue
        yield values, shape, torch.uint8
        yield scale, None if shape is None else (-(-math.prod(shape) // BLOCK),), torch.float32
    for name in extras_in(names, fields):
        yield name, tuple(shard.param.shape), torch.float32


def _shape_of(shard: LocalShard, target: Target, field: str, own: Tensor | None) -> Shape | None:
    """The shape of a field for all of a parameter; None where only its state could tell."""
    kind = target.kinds.get(field, "leaf")
    if kind == "element":
        return tuple(shard.param.shape)
    if kind == "block":
        return (-(-shard.param.numel() // target.block_size),)
    return None if own is None else tuple(own.shape)


def _sort(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"
