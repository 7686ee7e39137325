"""Reader of optimizer checkpoints: files of ``torch.save``, and folders."""

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.engine.messages import format_names
from sharding.checkpoint.old_format import OldCheckpoint, is_old_checkpoint, read_old_checkpoint
from sharding.zero.old_checkpoint import state_dict_of

StateDict = dict[str, Any]


class Checkpoint(NamedTuple):
    """Checkpoint of an optimizer."""

    kind: str
    """"state dict", "distributed checkpoint", or "folder of ZeroRedundancyOptimizer.save"."""
    state_dict: StateDict
    """The state in the form of torch.optim, with ``param_names`` if the checkpoint has names."""
    files: int
    """Number of files with state."""
    old: OldCheckpoint | None = None
    """The content of a folder that ``ZeroRedundancyOptimizer.save`` wrote."""


def read_checkpoint(path: Path, key: str | None = None, *, values: bool = True) -> Checkpoint:
    """Read a checkpoint of any kind, without running code from it.

    Args:
        path: a file of ``torch.save``, or a folder.
        key: of the state dict, with dots: see :func:`read_file`.
        values: False to return tensors on the device "meta" if that avoids reading values.

    Raises:
        OSError: there is no checkpoint, or a file cannot be read.
        ValueError: a file is damaged, or is not of an optimizer.
    """
    if not path.is_dir():
        return Checkpoint("state dict", read_file(path, key), 1)
    if is_old_checkpoint(path):
        old = read_old_checkpoint(path)
        kind = "folder of ZeroRedundancyOptimizer.save"
        return Checkpoint(kind, state_dict_of(old), old.shards, old)
    from sharding.storage.folder import read_folder  # noqa: PLC0415  slow to import

    content = read_folder(path, values=values)
    state_dict = _number_params(_find_state_dict(path, content, key))
    return Checkpoint("distributed checkpoint", state_dict, len([*path.glob("*.distcp")]))


def _number_params(state_dict: StateDict) -> StateDict:
    """Convert names of parameters to numbers, and add ``param_names``."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    numbers = {str(key): number for number, key in enumerate(keys)}
    unknown = [key for key in state_dict["state"] if str(key) not in numbers]
    if unknown:
        raise ValueError(
            f"there is state of {format_names(unknown)}, which no parameter group has; the file is "
            "damaged, or its state is of another model"
        )
    named = all(isinstance(key, str) for key in keys)
    groups = [
        {
            **group,
            "params": [numbers[str(key)] for key in group["params"]],
            **({"param_names": list(group["params"])} if named else {}),
        }
        for group in state_dict["param_groups"]
    ]
    states = {numbers[str(key)]: entries for key, entries in state_dict["state"].items()}
    return {**state_dict, "state": dict(sorted(states.items())), "param_groups": groups}


def read_file(path: Path, key: str | None = None) -> StateDict:
    """Read an optimizer's state dict from a file that ``torch.save`` wrote.

    The file is read with ``weights_only=True``, so no code from it runs.

    Args:
        path: the file.
        key: of the state dict in the file's dict, with dots (``"optimizer"``, ``"states.0"``).
            None: the file is the state dict, or has exactly one.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not from ``torch.save``, or has no such state dict.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.filename is not None:
            raise
        # The reader of a truncated archive looks for its parts at positions that it does not have.
        raise ValueError(f"{path} is not a file that torch.save wrote, or is damaged") from error
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = named[1] if named else "objects that are neither tensors nor plain values"
        raise ValueError(
            f"{path} cannot be read without running code: it has {what}. If you trust the file, "
            "load it in Python with torch.load(path, weights_only=False), and save the optimizer's "
            "state_dict() alone"
        ) from error
    except Exception as error:  # torch raises many types of errors for invalid bytes
        raise ValueError(f"{path} is not a file that torch.save wrote, or is damaged") from error
    return _find_state_dict(path, content, key)


def _find_state_dict(path: Path, content: Any, key: str | None) -> StateDict:
    """Return the state dict at a key, or the only one."""
    found = dict(_state_dicts(content))
    if key is not None:
        if key not in found:
            keys = _format_keys(found)
            raise ValueError(f"{path} has no optimizer's state dict at {key!r}; {keys}")
        return found[key]
    if len(found) != 1:
        keys = _format_keys(found) + ("; name one with --key" if found else "")
        raise ValueError(f"{path} has {len(found)} optimizers' state dicts: {keys}")
    (only,) = found.values()
    return only


def names_in(state_dict: StateDict) -> list[list[str]] | None:
    """Return the names of each group's parameters, or None if the state dict has no names."""
    groups = state_dict["param_groups"]
    found = [group.get("param_names") for group in groups if group["params"]]
    if not found or not all(isinstance(names, list) for names in found):
        return None
    return [list(group.get("param_names") or []) for group in groups]


def _state_dicts(content: Any, key: str = "") -> Iterator[tuple[str, StateDict]]:
    """Yield every optimizer's state dict in a file, with its key."""
    if isinstance(content, Mapping):
        if _is_state_dict(content):
            yield key, {"state": {}, **content}
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
    # A folder has no entries under "state" if no parameter has state.
    state, groups = content.get("state", {}), content.get("param_groups")
    return (
        isinstance(state, Mapping)
        and all(isinstance(entries, Mapping) for entries in state.values())
        and isinstance(groups, list)
        and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
        )
    )


def _format_keys(found: Mapping[str, Any]) -> str:
    if not found:
        return 'a state dict has "state" and "param_groups"'
    return "there is one at " + ", ".join(repr(key) if key else "the top" for key in found)
