"""Files of a checkpoint: raw bytes of each rank, and JSON that says what is where. No pickles.

A folder has, for each rank that wrote, ``TOKEN-RANK.bin`` and ``TOKEN-RANK.json``, and at its top
``checkpoint.json``, which names them and is put in place last, at once: until then, the checkpoint
that was there before is the valid one.
"""

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from sharding.zero.stream import CHUNK_BYTES, flat_bytes

INDEX = "checkpoint.json"
FORMAT = "sharding state"
VERSION = 1


class Chunk(NamedTuple):
    """Elements of a flat tensor in a file."""

    offset: int
    """The first of them, in the tensor."""
    length: int
    file: str
    begin: int
    """Where in the file, in bytes."""


class Saved(NamedTuple):
    """A flat tensor in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


def write_tensor(file: BinaryIO, tensor: Tensor) -> int:
    """Write the elements of a tensor, in the order of its shape; returns how many bytes."""
    flat = flat_bytes(tensor.detach().contiguous())
    for part in _parts(flat):
        on_cpu = part.cpu()
        file.write(_memory(on_cpu))
    return flat.numel()


def read_tensor(file: BinaryIO, begin: int, into: Tensor) -> None:
    """Read into a contiguous tensor, from a place in a file on.

    Raises:
        ValueError: the file is too short.
    """
    file.seek(begin)
    for part in _parts(flat_bytes(into)):
        on_cpu = part if part.is_cpu else torch.empty_like(part, device="cpu")
        # A file without a buffer may give less than it is asked for only at its end.
        if file.readinto(_memory(on_cpu)) != on_cpu.numel():  # type: ignore[attr-defined]  # a file without a buffer has it
            raise ValueError(f"{file.name} is shorter than its checkpoint says; it was damaged")
        if on_cpu is not part:
            part.copy_(on_cpu)


def _parts(flat: Tensor) -> Iterator[Tensor]:
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES]


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy."""
    kind = ctypes.c_char * flat.numel()
    return memoryview(kind.from_address(flat.data_ptr())).cast("B")


def put(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON at once: nobody finds half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def index_of(folder: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: it is of another kind.
    """
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {INDEX}, so no checkpoint was completed there; save() writes one"
        )
    content = _json(path)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format {content.get('format')!r}, version {content.get('version')!r}; "
            f"{FORMAT!r}, version {VERSION}, is read here"
        )
    return content


def tensors_of(folder: Path, shards: list[str]) -> dict[str, Saved]:
    """Every tensor of a checkpoint, by its key.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is shorter than it must be, or two disagree.
    """
    found: dict[str, Saved] = {}
    for shard in shards:
        content = _json(folder / f"{shard}.json")
        data = folder / f"{shard}.bin"
        length = data.stat().st_size
        if length < content["bytes"]:
            raise ValueError(
                f"{data} has {length} bytes, {content['bytes']} were written; it was damaged"
            )
        for key, (dtype, shape, chunks) in content["tensors"].items():
            made = tuple(Chunk(offset, length, shard, begin) for offset, length, begin in chunks)
            before = found.get(key, Saved(dtype, tuple(shape), ()))
            if before[:2] != (dtype, tuple(shape)):
                raise ValueError(
                    f"the files in {folder} disagree on {key!r}: they do not belong together"
                )
            found[key] = before._replace(chunks=(*before.chunks, *made))
    return found


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
