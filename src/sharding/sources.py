"""Sources of specs for the command line: a model, the header of a file, or a list of shapes."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from functional_optim import Optimizer
from functional_optim.commands.objects import current_folder_first, load_object
from functional_optim.engine.stages import MatrixBlocks
from sharding.model_specs import add_kinds, as_specs, specs_of
from sharding.plan_json import find_dtype, parse_json
from sharding.spec import ParameterSpec, Specs

SAFETENSORS, SHAPES = ".safetensors", ".json"
"""Suffixes of file names."""
HEADER_LIMIT = 100 * 2**20
"""The largest header that the safetensors format allows, in bytes."""

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
"""Dtypes of buffers and indices, which no optimizer steps."""


class Source(NamedTuple):
    """Parameters of a source."""

    specs: Specs
    left_out: tuple[str, ...]
    """Names of tensors that are not parameters, because of their dtype."""


def read_source(source: str, optimizer: Optimizer | None = None) -> Source:
    """Read the parameters of a source.

    Args:
        source: ``package.module:callable`` (called without arguments, on the meta device; it
            returns a module), the path of a ``.safetensors`` file (only its header is read), or of
            a ``.json`` file with shapes.
        optimizer: of the parameters. The kind and blocks of each parameter are those that its rule
            declares, unless a file of shapes has others.

    Raises:
        ValueError: the source is none of these, or its content is invalid.
        OSError: a file cannot be read.
        ImportError: a module cannot be imported.
    """
    path = Path(source)
    if path.suffix == SAFETENSORS:
        found = from_safetensors(path)
        return Source(add_kinds(found.specs, optimizer), found.left_out)
    if path.suffix == SHAPES:
        return Source(from_shapes(path, optimizer), ())
    if ":" in source:
        return Source(add_kinds(from_callable(source), optimizer), ())
    raise ValueError(
        "a model must be given as package.module:callable, or as a .safetensors or .json file, "
        f"got {source!r}"
    )


def from_callable(source: str) -> Specs:
    """Return the parameters of the module that ``package.module:callable`` returns."""
    with current_folder_first():  # the function may import modules of the current folder
        function = load_object(source)
        if not callable(function):
            raise ValueError(f"must be callable, it is {type(function).__name__}")
        with torch.device("meta"):
            model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(f"must return a torch.nn.Module, got {type(model).__name__}")
    return specs_of(model)


def from_safetensors(path: Path) -> Source:
    """Read the tensors of a safetensors file, sorted by name, from its header.

    The file begins with 8 bytes with the length of the header (little-endian), and the header in
    JSON.
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
    """Read parameters from a JSON list.

    Entries are shapes (``[[768, 768], [768]]``) or objects with a shape, and optionally a path, a
    dtype, a kind and blocks (``[{"path": "qkv", "shape": [2304, 768], "dtype": "bfloat16", "kind":
    "per_matrix", "blocks": {"row_blocks": 3}}]``).

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
        dtype = find_dtype(known.get("dtype", "float32"))
        name = known.get("path", f"parameter_{place}")
        kind = known.get("kind", "pointwise")
        blocks = _blocks(path, known.get("blocks"))
        specs.append(ParameterSpec(name, shape, dtype, kind=kind, blocks=blocks))
        declared.append("kind" in known)
    found = as_specs(specs)
    by_rule = add_kinds(found, optimizer)
    return tuple(a if own else b for a, b, own in zip(found, by_rule, declared, strict=True))


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
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} does not hold JSON where it must: {error}") from error
