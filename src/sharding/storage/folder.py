"""Folder of ``torch.distributed.checkpoint``, read whole by one process. No code of it runs."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from sharding.storage.checksums import METADATA, has_checksums
from sharding.storage.files import open_file
from sharding.storage.reader import ChecksumReader


def is_distributed_checkpoint(folder: Path) -> bool:
    """Return True if a checkpoint of torch.distributed.checkpoint was completed in a folder."""
    return (folder / METADATA).exists()


def read_folder(folder: Path, *, values: bool = True) -> dict[str, Any]:
    """Read all of a checkpoint, as the state dict that was saved.

    Files are compared with their checksums, if the folder has any.

    Args:
        folder: of the checkpoint.
        values: False for tensors on the device "meta" where they have more than one element.

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
    return _nested({**flat, **wanted}, metadata.planner_data or {})


def _check_sizes(folder: Path, metadata: Metadata) -> None:
    """Make sure that tensors are no larger than the files that have their elements.

    Raises:
        ValueError: a tensor is larger.
    """
    sizes: dict[str, int] = {}
    for one in metadata.storage_data.values():
        if one.relative_path not in sizes:
            with open_file(folder / one.relative_path) as file:
                sizes[one.relative_path] = file.seek(0, 2)
    left = sum(sizes.values())
    for key, one in metadata.state_dict_metadata.items():
        if not isinstance(one, BytesStorageMetadata):
            left -= math.prod(one.size) * one.properties.dtype.itemsize
            if left < 0:
                raise ValueError(f"{folder} has fewer bytes than {key!r} needs; it was damaged")


def _nested(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the dicts and lists that their keys were made of."""
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        is_path = isinstance(path, tuple) and path and all(type(k) in (str, int) for k in path)
        inner: Any = root
        for name in path[:-1] if is_path else ():
            inner = inner.setdefault(name, {}) if isinstance(inner, dict) else None
        if not is_path or not isinstance(inner, dict):
            raise ValueError(f"the metadata has no place for {key!r}, got {path!r}; it was damaged")
        inner[path[-1]] = value
    return {key: _with_lists(one) for key, one in root.items()}


def _with_lists(tree: Any) -> Any:
    """Return a tree in which dicts whose keys are numbers are lists."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(one) for key, one in tree.items()}
    is_list = bool(made) and all(type(key) is int for key in made)
    return [made[key] for key in sorted(made)] if is_list else made
