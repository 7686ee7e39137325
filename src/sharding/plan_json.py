"""JSON format of plans, in columns."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from functional_optim.engine.stages import MatrixBlocks
from sharding.ownership import Ownership
from sharding.pieces import Pieces
from sharding.spec import ParameterSpec, Specs

FORMAT = "functional-optim shard plan"
VERSION, WITHOUT_BLOCKS = 2, 1
"""The version of plans in which parameters have blocks, and that of all other plans."""
PARAMETER_FIELDS: Mapping[str, type] = {
    "path": str,
    "shape": list,
    "dtype": str,
    "device": str,
    "requires_grad": bool,
    "kind": str,
    "group": int,
}
BLOCK_FIELDS = ("row_blocks", "split_sizes", "batch_axes", "column_axes")
PIECE_FIELDS: Mapping[str, type] = dict.fromkeys(("parameter", "start", "stop", "rank"), int)


def dumps(plan: Ownership) -> str:
    """Return a plan as text, with keys in a fixed order and without spaces."""
    specs, pieces = plan.specs, plan.pieces
    parameters = {name: [getattr(spec, name) for spec in specs] for name in PARAMETER_FIELDS}
    names = {spec.dtype: dtype_name(spec.dtype) for spec in specs}
    parameters["dtype"] = [names[dtype] for dtype in parameters["dtype"]]
    has_blocks = any(spec.blocks is not None for spec in specs)
    if has_blocks:
        parameters["blocks"] = [_encode_blocks(spec.blocks) for spec in specs]
    content = {
        "format": FORMAT,
        "version": VERSION if has_blocks else WITHOUT_BLOCKS,
        "policy": plan.policy,
        "world_size": plan.world_size,
        "replicas": plan.replicas,
        "parameters": parameters,
        "pieces": {name: getattr(pieces, name) for name in PIECE_FIELDS},
    }
    return json.dumps(content, separators=(",", ":"))


def loads(text: str) -> dict[str, Any]:
    """Return the arguments of ShardPlan from a text."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"a plan must be JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"this JSON is no plan: it must have the format {FORMAT!r}")
    version = content.get("version")
    if type(version) is not int or version not in (WITHOUT_BLOCKS, VERSION):
        raise ValueError(
            f"this plan has version {version!r}, and versions {WITHOUT_BLOCKS} and {VERSION} are "
            "read here; make the plan again, or read it with the release that wrote it"
        )
    fields = {"policy": str, "world_size": int, "replicas": int}
    _check_keys(content, ("format", "version", *fields, "parameters", "pieces"), "a plan")
    for name, kind in fields.items():
        if type(content[name]) is not kind:
            raise ValueError(f"{name} of a plan must be {kind.__name__}, got {content[name]!r}")
    pieces = _columns(content["pieces"], PIECE_FIELDS, "pieces")
    columns = PARAMETER_FIELDS if version != VERSION else {**PARAMETER_FIELDS, "blocks": list}
    return {
        **{name: content[name] for name in fields},
        "specs": _specs(_columns(content["parameters"], columns, "parameters")),
        "pieces": Pieces(**{name: tuple(column) for name, column in pieces.items()}),
    }


def parse_json(text: str | bytes) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _check_keys(found: Mapping[str, Any], wanted: tuple[str, ...], what: str) -> None:
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    if missing or extra:
        parts = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"has unknown {', '.join(map(repr, extra))}"] if extra else []
        raise ValueError(
            f"{what} must have the fields {', '.join(wanted)}; it {' and '.join(parts)}"
        )


def _encode_blocks(blocks: MatrixBlocks | None) -> list[Any]:
    return [] if blocks is None else [getattr(blocks, name) for name in BLOCK_FIELDS]


def _decode_blocks(found: list[Any]) -> MatrixBlocks | None:
    if not found:
        return None
    if len(found) != len(BLOCK_FIELDS) or not isinstance(found[1], list):
        raise ValueError(f"blocks of a plan must be [{', '.join(BLOCK_FIELDS)}], got {found!r}")
    return MatrixBlocks(*found)


def _columns(found: Any, fields: Mapping[str, type], what: str) -> dict[str, list[Any]]:
    if not isinstance(found, dict):
        raise ValueError(f"{what} of a plan must be columns, got {type(found).__name__}")
    _check_keys(found, tuple(fields), what)
    for name, kind in fields.items():
        column = found[name]
        if not isinstance(column, list):
            raise ValueError(f"{what}: {name} must be a list, got {column!r}")
        if len(column) != len(found[next(iter(fields))]):
            raise ValueError(f"{what}: the columns must have one length, {name} has {len(column)}")
        for place, value in enumerate(column):
            if type(value) is not kind:
                raise ValueError(
                    f"{what}: {name} must hold {kind.__name__}, got {value!r} at place {place}"
                )
    return {name: found[name] for name in fields}


def _specs(columns: Mapping[str, list[Any]]) -> Specs:
    columns = {
        **columns,
        "shape": [tuple(shape) for shape in columns["shape"]],
        "dtype": list(map(find_dtype, columns["dtype"])),
    }
    try:
        if "blocks" in columns:
            columns["blocks"] = list(map(_decode_blocks, columns["blocks"]))
        return tuple(ParameterSpec(*row) for row in zip(*columns.values(), strict=True))
    except TypeError as error:
        raise ValueError(f"parameters of a plan: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: Any) -> torch.dtype:
    """Return the dtype of a name."""
    # Not getattr(torch, name): the name is from a file, and some names of torch import modules.
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"dtype must be the name of one of torch's, such as float32, got {name!r}")
    return _DTYPES[name]


_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
"""torch's dtypes, by all of their names."""
