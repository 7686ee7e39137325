"""Sources of parameters for the command line: a model, the header of a file, a list of shapes."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from functional_optim import Optimizer
from functional_optim.commands.objects import load_object
from functional_optim.core.blocks import MatrixBlocks
from sharding.model_specs import as_specs, specs_of, with_rules
from sharding.plan_json import dtype_named, parsed
from sharding.spec import ParameterSpec, Specs

SAFETENSORS, SHAPES = ".safetensors", ".json"
"""How the names of files end."""
HEADER_LIMIT = 100 * 2**20
"""Bytes; the format allows no longer header."""

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
OTHER_DTYPES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
"""Of buffers and indices, which no optimizer steps."""


class Source(NamedTuple):
    """Parameters, and what was left out."""

    specs: Specs
    left_out: tuple[str, ...]
    """Names of tensors that are no parameters, by their dtype."""


def read(source: str, optimizer: Optimizer | None = None) -> Source:
    """Parameters from wherever a text says.

    Args:
        source: ``package.module:callable`` (called without arguments, on the meta device, for a
            module), the path of a ``.safetensors`` file (its header is read, no more), or of a
            ``.json`` file with shapes.
        optimizer: what will step them. The kind and blocks of each parameter are those that its
            rule declares, unless a file of shapes has others.

    Raises:
        ValueError: none of these, or not of that form.
        OSError: a file that cannot be read.
        ImportError: a module that cannot be imported.
    """
    path = Path(source)
    if path.suffix == SAFETENSORS:
        found = from_safetensors(path)
        return Source(with_rules(found.specs, optimizer), found.left_out)
    if path.suffix == SHAPES:
        return Source(from_shapes(path, optimizer), ())
    if is_callable(source):
        return Source(with_rules(from_callable(source), optimizer), ())
    raise ValueError(
        "a model must be given as package.module:callable, or as a .safetensors or .json file, "
        f"got {source!r}"
    )


def is_callable(source: str) -> bool:
    """Return True if a text names a function that makes a model, and not a file."""
    return Path(source).suffix not in {SAFETENSORS, SHAPES} and ":" in source


def from_callable(source: str) -> Specs:
    """The parameters of the module that ``package.module:callable`` makes on the meta device."""
    maker = load_object(source)
    if not callable(maker):
        raise ValueError(f"must be callable, it is {type(maker).__name__}")
    with torch.device("meta"):
        model = maker()
    if not isinstance(model, nn.Module):
        raise ValueError(f"must return a torch.nn.Module, got {type(model).__name__}")
    return specs_of(model)


def from_safetensors(path: Path) -> Source:
    """The tensors of a safetensors file, by name, from its header alone.

    The format: 8 bytes with the header's length (little-endian), then the header, as JSON.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes")
        text = file.read(length)
    header = _json(path, text)
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is no object")
    specs, left_out = [], []
    for name, entry in sorted(header.items()):
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or "dtype" not in entry or "shape" not in entry:
            raise ValueError(f"{path}: the header has no dtype and shape of {name!r}")
        if entry["dtype"] in OTHER_DTYPES:
            left_out.append(name)
        elif entry["dtype"] in SAFETENSORS_DTYPES:
            dtype = SAFETENSORS_DTYPES[entry["dtype"]]
            specs.append(ParameterSpec(name, _shape(path, entry["shape"]), dtype))
        else:
            raise ValueError(f"{path}: {name!r} has the unknown dtype {entry['dtype']!r}")
    return Source(tuple(specs), tuple(left_out))


def from_shapes(path: Path, optimizer: Optimizer | None = None) -> Specs:
    """Parameters from a JSON list.

    Entries are shapes (``[[768, 768], [768]]``) or objects with a shape, and a path, a dtype, a
    kind and blocks where they are known (``[{"path": "qkv", "shape": [2304, 768], "dtype":
    "bfloat16", "kind": "per_matrix", "blocks": {"row_blocks": 3}}]``).

    Args:
        path: of the file.
        optimizer: gives the kind and blocks of entries without a kind.
    """
    entries = _json(path, path.read_bytes())
    if not isinstance(entries, list):
        raise ValueError(
            f"{path} must hold a list of shapes, got {type(entries).__name__}; write, for example, "
            '[[768, 768], {"path": "bias", "shape": [768]}]'
        )
    specs, declared = [], []
    for place, entry in enumerate(entries):
        known: Any = entry if isinstance(entry, dict) else {"shape": entry}
        unknown = set(known) - {"path", "shape", "dtype", "kind", "blocks"}
        if unknown or "shape" not in known:
            raise ValueError(
                f"{path}: entry {place} must be a shape, or an object with a shape and, if known, "
                f"a path, a dtype, a kind and blocks; got {entry!r}"
            )
        shape = _shape(path, known["shape"])
        dtype = dtype_named(known.get("dtype", "float32"))
        name = known.get("path", f"parameter_{place}")
        kind = known.get("kind", "pointwise")
        blocks = _blocks(path, known.get("blocks"))
        specs.append(ParameterSpec(name, shape, dtype, kind=kind, blocks=blocks))
        declared.append("kind" in known)
    found = as_specs(specs)
    ruled = with_rules(found, optimizer)
    return tuple(a if own else b for a, b, own in zip(found, ruled, declared, strict=True))


def _blocks(path: Path, given: Any) -> MatrixBlocks | None:
    if given is None:
        return None
    known = {one.name for one in fields(MatrixBlocks)}
    if not isinstance(given, dict) or set(given) - known:
        raise ValueError(
            f"{path}: blocks must be an object with some of {', '.join(sorted(known))}, got "
            f"{given!r}"
        )
    try:
        return MatrixBlocks(**given)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _shape(path: Path, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise ValueError(f"{path}: a shape must be a list of whole numbers, got {shape!r}")
    return tuple(shape)


def _json(path: Path, text: bytes) -> Any:
    try:
        return parsed(text)
    except ValueError as error:
        raise ValueError(f"{path} does not hold JSON where it must: {error}") from error
