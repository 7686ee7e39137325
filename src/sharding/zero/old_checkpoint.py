"""Checkpoints of the old format, as state dicts of torch.optim and of distributed checkpoints."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from functional_optim.engine.states import with_group_steps
from functional_optim.storage.conversion import decode_entries
from sharding.checkpoint.old_format import OldCheckpoint, read_old_checkpoint
from sharding.zero.state_layout import to_class_entries, with_class_step


def read_state_dict(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a folder that ``ZeroRedundancyOptimizer.save`` wrote, as a state dict of torch.optim.

    ``torch.distributed.checkpoint`` has replaced ``save``, and the next release will not read the
    old format: ``functional-optim convert`` rewrites such a folder. No pickle is read. Sizes,
    tables and checksums are checked; format version 1 has no checksums.

    The plain optimizer of the same class, over the same parameters in the same groups, loads the
    result. So does a ZeroRedundancyOptimizer on any number of ranks; each rank reads all of it.
    State in other storages (``functional_optim.stored``) is decoded to float32. Extra digits of a
    bfloat16 parameter keep their name, ``master`` or ``compensation``. torch.optim keeps such
    entries, and does not use them: copy the master into float32 parameters to continue with all
    digits.

    Args:
        path: the folder.

    Returns:
        ``{"state": ..., "param_groups": ...}``, with tensors on the CPU.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        ValueError: a damaged or missing file, or another format.

    Example::

        >>> import tempfile
        >>> read_state_dict(tempfile.mkdtemp())
        Traceback (most recent call last):
        FileNotFoundError: ... has no checkpoint.json, so no checkpoint was completed there
    """
    return state_dict_of(read_old_checkpoint(Path(path)))


def state_dict_of(old: OldCheckpoint) -> dict[str, Any]:
    """Return an old checkpoint as a state dict of torch.optim, with names if there are any."""
    paths = [path for group in old.groups for path in group["params"]]
    numbers = {path: number for number, path in enumerate(paths)}
    written = {
        numbers[path]: to_class_entries(
            entries, old.form, old.fields, starts_late=path in old.starts_late
        )
        for path, entries in _plain(old).items()
    }
    groups = [
        {
            **_options(old, group),
            "params": [numbers[path] for path in group["params"]],
            **({"param_names": list(group["params"])} if old.has_names else {}),
        }
        for group in old.groups
    ]
    return {
        "state": {number: written[number] for number in sorted(written) if written[number]},
        "param_groups": with_group_steps(written, groups),
    }


def distributed_state_dict_of(old: OldCheckpoint) -> dict[str, Any]:
    """Return an old checkpoint as ``get_optimizer_state_dict`` returns it for a ZeRO: by name."""
    groups = [{**_options(old, group), "params": list(group["params"])} for group in old.groups]
    states = {path: with_class_step(entries, old.form) for path, entries in _plain(old).items()}
    return {"state": states, "param_groups": groups}


def _plain(old: OldCheckpoint) -> dict[str, Any]:
    """Return the state of each parameter in float32."""
    if not old.stored:
        return dict(old.entries)
    return {path: decode_entries(entries, old.fields) for path, entries in old.entries.items()}


def _options(old: OldCheckpoint, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group. Lists become tuples again, which JSON does not have."""
    every = {**group["options"], **old.extra}
    return {key: tuple(one) if isinstance(one, list) else one for key, one in every.items()}
