"""Files of one rank in a checkpoint: ``TOKEN-RANK.bin`` has bytes, ``TOKEN-RANK.json`` its table.

No pickles. What a save that was killed has left here is found by its names, and by nothing else.
"""

import ctypes
import json
import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from sharding.plan_json import dtype_name
from sharding.zero.disk import Disk, NewFile, opened_shard, size_of
from sharding.zero.manifest import LEFTOVER, Checksum, ShardRecord
from sharding.zero.stream import CHUNK_BYTES, flat_bytes
from sharding.zero.tables import SavedTensor


class Ranges(NamedTuple):
    """Some elements of a flat tensor, as they lie in memory."""

    shape: tuple[int, ...]
    """Of the whole tensor, before it was laid flat."""
    parts: Mapping[int, Tensor]
    """By the first element, contiguous tensors of one dimension."""


def write_shard(disk: Disk, folder: Path, name: str, state: Mapping[str, Ranges]) -> ShardRecord:
    """Write these ranges as one shard; nothing is left of it where that fails.

    Raises:
        OSError: not all of it could be written.
    """
    tensors: dict[str, Any] = {}
    data = folder / f"{name}.bin"
    with NewFile(disk, data) as file:
        for key, ranges in state.items():
            chunks = []
            for offset, part in ranges.parts.items():
                chunks.append((offset, part.numel(), file.size))
                _write_tensor(file, part)
            (dtype,) = {part.dtype for part in ranges.parts.values()}
            tensors[key] = (dtype_name(dtype), ranges.shape, chunks)
    text = json.dumps({"bytes": file.size, "tensors": tensors}).encode()
    try:
        with NewFile(disk, folder / f"{name}.json") as table:
            table.write(memoryview(text))
        disk.sync_folder(folder)
    except BaseException:
        for path in (data, data.with_suffix(".json")):
            with suppress(OSError):
                disk.unlink(path)
        raise
    return ShardRecord(name, Checksum(file.size, file.crc32), Checksum(table.size, table.crc32))


def _write_tensor(file: NewFile, tensor: Tensor) -> None:
    """Write the elements of a tensor, in the order of its shape."""
    for part in _blocks(flat_bytes(tensor.detach().contiguous())):
        on_cpu = part.cpu()
        file.write(_memory(on_cpu))


def _read_tensor(file: BinaryIO, begin: int, into: Tensor) -> None:
    """Read into a contiguous tensor, from a place in a file on."""
    file.seek(begin)
    for part in _blocks(flat_bytes(into)):
        on_cpu = part if part.is_cpu else torch.empty_like(part, device="cpu")
        _fill(file, _memory(on_cpu))
        if on_cpu is not part:
            part.copy_(on_cpu)


def _fill(file: BinaryIO, memory: memoryview) -> None:
    """Read as many bytes as the memory has.

    Raises:
        ValueError: the file ends before.
    """
    while memory:
        count = file.readinto(memory)  # type: ignore[attr-defined]  # a file without a buffer has it
        if not count:
            raise ValueError(f"{file.name} is shorter than its checkpoint says; it was damaged")
        memory = memory[count:]


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES]


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy."""
    kind = ctypes.c_char * flat.numel()
    return memoryview(kind.from_address(flat.data_ptr())).cast("B")


def check_bytes(folder: Path, records: Iterable[ShardRecord]) -> None:
    """Read the files of bytes of some shards, and compare them with their checksums.

    Raises:
        ValueError: a file is missing, or not what was written.
    """
    block = memoryview(bytearray(CHUNK_BYTES))
    for record in records:
        if record.data is None:  # of version 1, which had no checksums
            continue
        path = folder / f"{record.name}.bin"
        found = 0
        with opened_shard(path) as file:
            left = record.data.size
            while left:
                part = block[: min(left, CHUNK_BYTES)]
                _fill(file, part)
                found = crc32(part, found)
                left -= len(part)
        if found != record.data.crc32:
            raise ValueError(
                f"{path} has the CRC-32 {found:08x}, {record.data.crc32:08x} was written; it was "
                "damaged: go on from another checkpoint"
            )


def check_written(folder: Path, records: Iterable[ShardRecord]) -> None:
    """The files that other ranks have written are here, and whole.

    Raises:
        OSError: one is not.
    """
    for record in records:
        for ending, wanted in (("bin", record.data), ("json", record.table)):
            path = folder / f"{record.name}.{ending}"
            found = size_of(path)
            if wanted is None or found != wanted.size:
                there = "is not there" if found is None else f"has {found} bytes"
                raise OSError(
                    f"{path} {there}, as group rank 0 sees it, and its rank has written "
                    f"{wanted and wanted.size} bytes; a checkpoint is saved to a folder that all "
                    "ranks see"
                )


def remove_leftovers(disk: Disk, folder: Path, keep: Collection[str]) -> None:
    """Remove what saves have left in a folder: files with the names of shards, and no others.

    Args:
        disk: where they are removed.
        folder: a folder of checkpoints.
        keep: the shards that stay.
    """
    for name in sorted(os.listdir(folder)):  # noqa: PTH208  names are what is matched
        match = LEFTOVER.fullmatch(name)
        if match is not None and match["shard"] not in keep:
            # What cannot be removed now is removed by the next save, and harms no checkpoint.
            with suppress(OSError):
                disk.unlink(folder / name)


def read_ranges(
    state: Mapping[str, Ranges], folder: Path, saved: Mapping[str, SavedTensor]
) -> None:
    """Read these ranges, whoever wrote which part of them, file by file and from front to back."""
    wanted: dict[str, list[tuple[int, Tensor]]] = {}
    for key, ranges in state.items():
        for start, into in ranges.parts.items():
            for shard, begin, part in _sources(saved[key], start, into):
                wanted.setdefault(shard, []).append((begin, part))
    for shard, parts in wanted.items():
        with opened_shard(folder / f"{shard}.bin") as file:
            for begin, part in sorted(parts, key=lambda one: one[0]):
                _read_tensor(file, begin, part)


def _sources(one: SavedTensor, start: int, into: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """(shard, where in its file, what of ``into`` it fills) for elements from ``start`` on."""
    stop = start + into.numel()
    chunks: Sequence[Any] = one.chunks
    first = max(bisect_right(chunks, start, key=lambda chunk: chunk.offset) - 1, 0)
    for chunk in chunks[first:]:
        low, high = max(start, chunk.offset), min(stop, chunk.offset + chunk.length)
        if low >= high:
            break
        begin = chunk.begin + (low - chunk.offset) * into.element_size()
        yield chunk.shard, begin, into[low - start : high - start]


def read_step_counts(folder: Path, saved: Mapping[str, SavedTensor]) -> list[int]:
    """Read the step count of every parameter that has state.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged.
    """
    found = {
        key: torch.empty(1, dtype=one.dtype, device="cpu")
        for key, one in saved.items()
        if key.rpartition("/")[2] == "step"
    }
    read_ranges({key: Ranges((), {0: into}) for key, into in found.items()}, folder, saved)
    return [int(one.item()) for one in found.values()]
