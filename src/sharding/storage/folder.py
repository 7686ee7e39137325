"""Checkpoint folder of ``torch.distributed.checkpoint``, read without running its code."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from sharding.storage.checksums import has_checksums
from sharding.storage.reader import ChecksumReader

MAX_DEPTH = 100
"""Maximum depth of nested dicts and lists."""


def read_folder(folder: Path, *, values: bool = True) -> dict[str, Any]:
    """Read all of a checkpoint, as the state dict that was saved.

    Files are compared with their checksums, if the folder has any.

    Args:
        folder: of the checkpoint.
        values: False to return tensors with several elements on the device "meta".

    Returns:
        Nested dicts and lists; tensors on the CPU.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, or cannot be read without running code.
    """
    reader = ChecksumReader(folder, verify=values and has_checksums(folder))
    metadata = reader.read_metadata()
    _check_sizes(folder, metadata)
    flat: dict[str, Any] = {}
    for key, one in metadata.state_dict_metadata.items():
        if isinstance(one, BytesStorageMetadata):
            flat[key] = None
            continue
        is_read = values or math.prod(one.size) == 1
        device = "cpu" if is_read else "meta"
        flat[key] = torch.empty(one.size, dtype=one.properties.dtype, device=device)
    wanted = {key: one for key, one in flat.items() if one is None or not one.is_meta}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        (why, _), *_ = error.failures.values()
        raise ValueError(f"{folder} cannot be read: {why}") from error
    return _unflatten({**flat, **wanted}, metadata.planner_data or {})


def _check_sizes(folder: Path, metadata: Metadata) -> None:
    """Raise ValueError if tensors are larger than the files with their elements."""
    sizes: dict[str, int] = {}
    for one in metadata.storage_data.values():
        if one.relative_path not in sizes:
            sizes[one.relative_path] = (folder / one.relative_path).lstat().st_size
    left = sum(sizes.values())
    for key, one in metadata.state_dict_metadata.items():
        if not isinstance(one, BytesStorageMetadata):
            left -= math.prod(one.size) * one.properties.dtype.itemsize
            if left < 0:
                raise ValueError(f"{folder} has fewer bytes than {key!r} needs; it was damaged")


def _unflatten(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in nested dicts and lists, by the paths of their keys."""
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        inner: Any = root if _is_path(path) else None
        for name in path[:-1] if inner is not None else ():
            inner = inner.setdefault(name, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or path[-1] in inner:
            raise ValueError(f"the metadata has no place for {key!r}, got {path!r}; it was damaged")
        inner[path[-1]] = value
    return {key: _restore_lists(one) for key, one in root.items()}


def _is_path(path: Any) -> bool:
    """Return True for keys of dicts and indices of lists, from the outermost to the innermost."""
    is_tuple = isinstance(path, tuple) and 0 < len(path) < MAX_DEPTH
    return is_tuple and all(type(one) in (str, int) for one in path)


def _restore_lists(tree: Any) -> Any:
    """Return a tree in which dicts with int keys are lists."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _restore_lists(one) for key, one in tree.items()}
    is_list = bool(made) and all(type(key) is int for key in made)
    return [made[key] for key in sorted(made)] if is_list else made
