"""Checkpoints of optimizers on a disk: files of ``torch.save``, and folders that ZeRO writes."""

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharding.zero.manifest import MANIFEST, Manifest, manifest_of
from sharding.zero.read import read_state_dict
from sharding.zero.tables import SavedTensor, tensors_of

StateDict = dict[str, Any]


class ShardedFolder(NamedTuple):
    """A checkpoint that ``ZeroRedundancyOptimizer.save`` wrote: its tables, without the values."""

    path: Path
    manifest: Manifest
    tensors: Mapping[str, SavedTensor]
    """By the path of the parameter, "/", and the name of the field."""


def is_folder(path: Path) -> bool:
    """Return True for a folder of a sharded checkpoint, or its manifest."""
    return path.is_dir() or path.name == MANIFEST


def read_folder(path: Path) -> ShardedFolder:
    """Read the manifest and the tables of a sharded checkpoint, and check them.

    Raises:
        OSError: there is no checkpoint, or a file is missing.
        ValueError: a file is damaged.
    """
    folder = path.parent if path.name == MANIFEST else path
    manifest = manifest_of(folder)
    return ShardedFolder(folder, manifest, tensors_of(folder, manifest))


def read_file(path: Path, key: str | None = None) -> StateDict:
    """Read an optimizer's state dict from a file that ``torch.save`` wrote.

    No code of the file runs: it is read with ``weights_only=True``.

    Args:
        path: the file.
        key: where the state dict is in the file's dict, with dots (``"optimizer"``,
            ``"states.0"``). None: the file is the state dict, or has exactly one.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of ``torch.save``, or has no such state dict.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = named[1] if named else "objects that are neither tensors nor plain values"
        raise ValueError(
            f"{path} cannot be read without running code: it has {what}. If you trust the file, "
            "load it in Python with torch.load(path, weights_only=False), and save the optimizer's "
            "state_dict() alone"
        ) from error
    except Exception as error:  # torch raises whatever the bytes lead to
        raise ValueError(f"{path} is not a file that torch.save wrote, or is damaged") from error
    found = dict(_state_dicts(content))
    if key is not None:
        if key not in found:
            raise ValueError(f"{path} has no optimizer's state dict at {key!r}; {_places(found)}")
        return found[key]
    if len(found) != 1:
        hint = "; name one with --key" if found else ""
        raise ValueError(f"{path} has {len(found)} optimizers' state dicts: {_places(found)}{hint}")
    (only,) = found.values()
    return only


def names_in(state_dict: StateDict) -> list[list[str]] | None:
    """Return the names of the parameters of each group, or None if the file has no names."""
    groups = state_dict["param_groups"]
    found = [group.get("param_names") for group in groups if group["params"]]
    if not found or not all(isinstance(names, list) for names in found):
        return None
    return [list(group.get("param_names") or []) for group in groups]


def state_dict_of(folder: ShardedFolder) -> StateDict:
    """Read a sharded checkpoint as one state dict of torch.optim, with the parameters' names."""
    found = read_state_dict(folder.path)
    groups = [list(group["params"]) for group in folder.manifest.groups]
    if not _are_numbers(groups):
        for group, names in zip(found["param_groups"], groups, strict=True):
            group["param_names"] = names
    return found


def _are_numbers(groups: list[list[str]]) -> bool:
    """Return True if the paths are those of an optimizer whose parameters have no names."""
    return all(
        path == f"{number}.{place}"
        for number, paths in enumerate(groups)
        for place, path in enumerate(paths)
    )


def _state_dicts(content: Any, key: str = "") -> Iterator[tuple[str, StateDict]]:
    """Yield every optimizer's state dict in a file, with its key."""
    if isinstance(content, Mapping):
        if _is_state_dict(content):
            yield key, dict(content)
            return
        entries = list(content.items())
    elif isinstance(content, (list, tuple)):
        entries = list(enumerate(content))
    else:
        return
    for name, one in entries:
        if not isinstance(one, Tensor):
            yield from _state_dicts(one, f"{key}.{name}" if key else str(name))


def _is_state_dict(content: Mapping[Any, Any]) -> bool:
    state, groups = content.get("state"), content.get("param_groups")
    return (
        isinstance(state, Mapping)
        and all(isinstance(entries, Mapping) for entries in state.values())
        and isinstance(groups, list)
        and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
        )
    )


def _places(found: Mapping[str, Any]) -> str:
    if not found:
        return 'a state dict has "state" and "param_groups"'
    return "there is one at " + ", ".join(repr(key) if key else "the top" for key in found)
