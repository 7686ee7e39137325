"""Reader of the format that ``ZeroRedundancyOptimizer.save`` wrote before it was replaced.

A folder has ``checkpoint.json``, which names the shards, and for each shard ``NAME.bin`` with the
bytes of tensors and ``NAME.json`` with their table: dtype, shape, and chunks of (first element,
number of elements, first byte). Version 2 has the size and the CRC-32 of each file; version 1 has
no checksums. All content is checked: chunks must tile each file and each tensor, so a forged table
cannot declare a tensor that is larger than its bytes.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from functional_optim.engine.recipes import StateDictForm

MANIFEST = "checkpoint.json"
FORMAT, VERSIONS = "sharding state", (1, 2)
_SHARD = re.compile(r"[0-9a-f]{8}-[0-9]{5,7}")
_LARGEST = 1 << 63
_Plain = None | bool | int | float | str
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and "float8" not in str(one) and "q" not in str(one)
}


class OldCheckpoint(NamedTuple):
    """State of all ranks of a ZeroRedundancyOptimizer."""

    parameters: Mapping[str, tuple[int, ...]]
    """The shape of each parameter, by its path."""
    groups: Sequence[Mapping[str, Any]]
    """The paths ("params") and options ("options") of each parameter group."""
    form: StateDictForm
    """The form in which torch.optim writes this state."""
    extra: Mapping[str, Any]
    """Options that the class writes into every group."""
    stored: bool
    """True if any state is not stored as float32."""
    fields: Sequence[str]
    """Names of the plain fields of state."""
    starts_late: Sequence[str]
    """Paths of parameters whose state torch creates in the first step."""
    shards: int
    """Number of ranks that wrote a part."""
    entries: Mapping[str, Mapping[str, Tensor]]
    """State by the path of a parameter and the name of the tensor. All parameters have "step"."""

    @property
    def has_names(self) -> bool:
        """Return True if the paths are names, and not numbers of groups and parameters."""
        return any(
            path != f"{number}.{place}"
            for number, group in enumerate(self.groups)
            for place, path in enumerate(group["params"])
        )


class _Chunk(NamedTuple):
    """Range of elements of a flat tensor in a file."""

    first: int
    length: int
    data: memoryview
    """The bytes of the file, from the first element on."""


class _Table(NamedTuple):
    """Tensor of a checkpoint, and the chunks with its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def is_old_checkpoint(folder: Path) -> bool:
    """Return True if a folder has a checkpoint of the old format."""
    return (folder / MANIFEST).exists()


def read_old_checkpoint(folder: Path) -> OldCheckpoint:
    """Read a whole checkpoint of any number of ranks, without pickle."""
    from sharding.storage.files import read_file  # noqa: PLC0415  slow to import

    path = folder / MANIFEST
    try:
        text = read_file(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}, so no checkpoint was completed there"
        ) from error
    content = _object(text, path)
    version = content.get("version")
    if content.get("format") != FORMAT or type(version) is not int or version not in VERSIONS:
        raise ValueError(
            f"{path} has format {content.get('format')!r}, version {version!r}; {FORMAT!r}, "
            "versions 1 and 2, is read here"
        )
    rest = {key: value for key, value in content.items() if key != "crc32"}
    _require(
        version == 1 or content.get("crc32") == crc32(json.dumps(rest).encode()),
        path,
        "the checksum that it names",
    )
    found = _parse_manifest(content, path)
    shards = _parse_shards(content, path, version)
    tables: dict[str, _Table] = {}
    for name, data, table in shards:
        path = folder / f"{name}.json"
        files = _read_checked(folder / f"{name}.bin", data), _read_checked(path, table)
        for key, one in _parse_table(path, *files).items():
            before = tables.get(key, one._replace(chunks=()))
            _require(before[:2] == one[:2], folder, f"one dtype and shape of {key!r}")
            tables[key] = before._replace(chunks=(*before.chunks, *one.chunks))
    return found._replace(shards=len(shards), entries=_entries(folder, tables, found.parameters))


def _read_checked(path: Path, sums: Sequence[int] | None) -> bytes:
    """Read a file, and check its size and checksum."""
    from sharding.storage.files import read_file  # noqa: PLC0415  slow to import

    try:
        content = read_file(path)
    except FileNotFoundError as error:  # it would say that there is no checkpoint
        raise ValueError(f"{path} is missing; copy the whole folder") from error
    if sums is not None and [len(content), crc32(content)] != sums:
        raise ValueError(f"{path} does not have its size and CRC-32, {sums}; it was damaged")
    return content


def _entries(
    folder: Path, tables: Mapping[str, _Table], parameters: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each parameter, after checking that all chunks tile them."""
    for key, one in tables.items():
        path, _, name = key.rpartition("/")
        _require(path in parameters and name, folder, f"known parameters, got {key!r}")
        step = tables.get(f"{path}/step")
        _require(step is not None and step.shape == (), folder, f"a step count of {path!r}")
        runs = [(chunk.first, chunk.length) for chunk in one.chunks]
        _require(_end(runs) == math.prod(one.shape), folder, f"each element of {key!r} once")
    found: dict[str, dict[str, Tensor]] = {}
    for key, one in tables.items():
        path, _, name = key.rpartition("/")
        flat = torch.empty(math.prod(one.shape), dtype=one.dtype, device="cpu")
        for chunk in one.chunks:
            part = torch.frombuffer(chunk.data, dtype=one.dtype, count=chunk.length)
            flat[chunk.first : chunk.first + chunk.length] = part
        found.setdefault(path, {})[name] = flat.view(one.shape)
    return found


def _parse_table(path: Path, data: bytes, text: bytes) -> dict[str, _Table]:
    """Return the tensors of a shard, after checking that their chunks tile its file."""
    content = _object(text, path)
    tensors: Any = content.get("tensors")
    _require(content.get("bytes") == len(data), path, f"the {len(data)} bytes of its file")
    _require(isinstance(tensors, dict), path, "tensors")
    found, runs, memory = dict[str, _Table](), list[tuple[int, int]](), memoryview(bytearray(data))
    for key, one in tensors.items():
        _require(isinstance(one, list) and len(one) == 3, path, f"dtype, shape, chunks of {key!r}")
        name, shape, chunks = one
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise ValueError(f"{path} has {key!r} in {name!r}, a dtype that no state is kept in")
        of_chunks = isinstance(chunks, list) and all(_is_counts(k) and len(k) == 3 for k in chunks)
        _require(_is_counts(shape) and of_chunks, path, f"counts in shape and chunks of {key!r}")
        runs += [(begin, count * dtype.itemsize) for _, count, begin in chunks]
        full = [_Chunk(first, count, memory[begin:]) for first, count, begin in chunks if count]
        found[key] = _Table(dtype, tuple(shape), tuple(full))
    _require(_end(runs) == len(data), path, "tensors that tile its file, without gap or overlap")
    return found


def _end(runs: Iterable[tuple[int, int]]) -> int | None:
    """Return the end of consecutive runs from 0 on; None if they have gaps or overlaps."""
    end = 0
    for begin, length in sorted(run for run in runs if run[1]):
        if begin != end:
            return None
        end += length
    return end


def _parse_manifest(content: Mapping[str, Any], path: Path) -> OldCheckpoint:
    """Return the content of a manifest, without shards and state."""
    # The first manifests have no fields for storages and for parameters that start late.
    content = {"starts_late": [], "stored": False, **content}
    kinds = {"parameters": dict, "groups": list, "form": dict, "extra": dict, "stored": bool}
    for key, kind in {**kinds, "fields": list, "starts_late": list}.items():
        _require(type(content.get(key)) is kind, path, f"{key!r} as {kind.__name__}")
    parameters, form = content["parameters"], content["form"]
    for name, shape in parameters.items():
        _require(_is_counts(shape), path, f"shapes of parameters, got {shape!r} for {name!r}")
    known = form.keys() <= {"counts_steps", "eager"}
    _require(known and all(type(k) is bool for k in form.values()), path, "a form of bools")
    for key in ("fields", "starts_late"):
        _require(all(isinstance(one, str) for one in content[key]), path, f"names in {key!r}")
    left = set(parameters)
    for group in content["groups"]:
        _require(isinstance(group, dict), path, f"groups as objects, got {group!r}")
        params = group.get("params")
        _require(isinstance(params, list) and _is_options(group.get("options")), path, "groups")
        for name in params:
            _require(isinstance(name, str) and name in left, path, f"{name!r} in one group, once")
            left.remove(name)
    _require(not left and _is_options(content["extra"]), path, "each parameter in one group")
    return OldCheckpoint(
        {name: tuple(shape) for name, shape in parameters.items()},
        content["groups"],
        StateDictForm(form.get("counts_steps", True), form.get("eager", True)),
        content["extra"],
        content["stored"],
        content["fields"],
        content["starts_late"],
        0,
        {},
    )


def _parse_shards(
    content: Mapping[str, Any], path: Path, version: int
) -> list[tuple[str, Any, Any]]:
    """Return the name of each shard, and the checksums of its two files or None."""
    shards: Any = content.get("shards")
    _require(isinstance(shards, list), path, "shards")
    if version == 1:
        found = [(one, None, None) for one in shards]
    else:
        _require(all(isinstance(one, dict) for one in shards), path, "shards as objects")
        found = [(one.get("name"), one.get("data"), one.get("table")) for one in shards]
        sums: list[Any] = [one for _, *both in found for one in both]
        _require(all(_is_counts(k) and len(k) == 2 for k in sums), path, "a size and a CRC-32")
    for name, _, _ in found:
        _require(isinstance(name, str) and _SHARD.fullmatch(name), path, f"shards, got {name!r}")
    _require(len({name for name, _, _ in found}) == len(found), path, "every shard once")
    return found


def _object(text: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read; it was damaged: {error}") from error
    _require(isinstance(content, dict), path, "a JSON object")
    return dict(content)


def _is_counts(value: Any) -> bool:
    """Return True for a list of integers >= 0."""
    return isinstance(value, list) and all(type(k) is int and 0 <= k < _LARGEST for k in value)


def _is_options(value: Any) -> bool:
    """Return True for a dict of plain values or lists of plain values, as options of a group."""
    if not isinstance(value, dict) or value.keys() & {"params", "param_names"}:
        return False
    every = [k for one in value.values() for k in (one if isinstance(one, list) else [one])]
    return all(isinstance(one, _Plain) for one in every)


def _require(right: object, path: Path, what: str) -> None:
    if not right:
        what = what if len(what) < 500 else f"{what[:500]} ..."
        raise ValueError(f"{path} must have {what}; it was damaged, or is of another kind")
