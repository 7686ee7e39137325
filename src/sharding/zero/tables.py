"""The tables of a checkpoint: which elements of which tensor lie where in the files of bytes.

A table is believed once it tiles: the chunks of each file lie in it one behind the other, from its
first byte to its last, and the chunks of each tensor, of all files, are each of its elements once.
So no tensor is larger than the bytes that are there for it.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch

from sharding.plan_json import dtype_named
from sharding.zero.disk import opened_shard, size_of
from sharding.zero.manifest import Manifest, ShardRecord, is_count, is_shape, parsed

INTEGERS = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16),
        *(torch.int32, torch.uint32, torch.int64, torch.uint64),
    )
)


class FileRange(NamedTuple):
    """Elements of a flat tensor in a file."""

    offset: int
    """The first of them, in the tensor."""
    length: int
    shard: str
    begin: int
    """Where in the file, in bytes."""


class SavedTensor(NamedTuple):
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[FileRange, ...]
    """In the order of its elements; none is empty."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def tensors_of(folder: Path, manifest: Manifest) -> dict[str, SavedTensor]:
    """Every tensor of a checkpoint, by its key: the path of a parameter, "/", and a name.

    Raises:
        ValueError: a file is missing or not what the manifest says, or a table does not tile.
    """
    found: dict[str, SavedTensor] = {}
    for record in manifest.shards:
        for key, one in _table_of(folder, record).items():
            path, _, name = key.rpartition("/")
            if path not in manifest.parameters or not name:
                raise ValueError(
                    f"{folder / record.name}.json has {key!r}, of a parameter that the checkpoint "
                    "does not have; it was damaged"
                )
            before = found.get(key, one._replace(chunks=()))
            if before[:2] != one[:2]:
                raise ValueError(
                    f"the files in {folder} disagree on {key!r}: they do not belong together"
                )
            found[key] = before._replace(chunks=(*before.chunks, *one.chunks))
    for path in names_by_path(found):
        step = found.get(f"{path}/step")
        if step is None or step.shape != ():
            raise ValueError(
                f"the files in {folder} have no step count of {path!r}; the checkpoint was damaged"
            )
    return {key: _tiled(folder, key, one) for key, one in found.items()}


def _table_of(folder: Path, record: ShardRecord) -> dict[str, SavedTensor]:
    """The table of one shard, whose chunks tile its file."""
    path = folder / f"{record.name}.json"
    with opened_shard(path) as file:
        text = file.read()
    if record.table is not None and record.table != (len(text), crc32(text)):
        raise ValueError(f"{path} does not have the size and the checksum that it was written with")
    content = parsed(text, path)
    size, tensors = content.get("bytes"), content.get("tensors")
    if not is_count(size) or not isinstance(tensors, dict):
        raise ValueError(f'{path} must have "bytes" and "tensors"; it was damaged')
    data = folder / f"{record.name}.bin"
    if size_of(data) != size or (record.data is not None and record.data.size != size):
        there = size_of(data)
        raise ValueError(
            f"{data} {'is missing' if there is None else f'has {there} bytes'}, {size} were "
            "written; it was damaged"
        )
    found = {key: _tensor(path, key, one, record.name) for key, one in tensors.items()}
    runs = (
        (chunk.begin, chunk.length * one.dtype.itemsize)
        for one in found.values()
        for chunk in one.chunks
    )
    end = _end_of(runs)
    if end != size:
        raise ValueError(
            f"{path} does not tile the {size} bytes of its file: from byte {end} on there is a gap "
            "or an overlap; it was damaged"
        )
    return found


def _tensor(path: Path, key: str, value: Any, shard: str) -> SavedTensor:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{path} must have dtype, shape and chunks of {key!r}, got {value!r}")
    name, shape, chunks = value
    dtype = dtype_named(name)
    if not (dtype.is_floating_point or dtype.is_complex or dtype in INTEGERS):
        raise ValueError(f"{path} has {key!r} in {name}, a dtype that no state is kept in")
    if not is_shape(shape):
        raise ValueError(f"{path} must have a shape of {key!r}, got {shape!r}; it was damaged")
    if not isinstance(chunks, list) or not all(is_shape(one) and len(one) == 3 for one in chunks):
        raise ValueError(
            f"{path} must have chunks of {key!r} as offset, length and begin, numbers from 0 on; "
            "it was damaged"
        )
    return SavedTensor(
        dtype,
        tuple(shape),
        tuple(
            FileRange(offset, length, shard, begin) for offset, length, begin in chunks if length
        ),
    )


def _end_of(runs: Iterable[tuple[int, int]]) -> int:
    """Up to where runs, each a beginning and a length, lie one behind the other, from 0 on."""
    end = 0
    for begin, length in sorted(run for run in runs if run[1]):
        if begin != end:
            break
        end += length
    return end


def _tiled(folder: Path, key: str, one: SavedTensor) -> SavedTensor:
    """A tensor whose chunks are each of its elements once, in their order."""
    end = _end_of((chunk.offset, chunk.length) for chunk in one.chunks)
    if end != one.numel or sum(chunk.length for chunk in one.chunks) != end:
        raise ValueError(
            f"the files in {folder} do not have each element of {key!r} once: of {one.numel}, what "
            f"comes after the first {end} is missing or there twice; the checkpoint was damaged"
        )
    return one._replace(chunks=tuple(sorted(one.chunks)))


def names_by_path(saved: Iterable[str]) -> dict[str, list[str]]:
    """The names of the tensors of each parameter."""
    found: dict[str, list[str]] = {}
    for key in saved:
        path, _, name = key.rpartition("/")
        found.setdefault(path, []).append(name)
    return found
