"""Checkpoints of any number of ranks, read by one process for a plain torch.optim optimizer."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.frontends.torch_checkpoint import with_group_steps
from functional_optim.storage.plain import decoded
from sharding.zero.convert import as_class_writes
from sharding.zero.manifest import manifest_of
from sharding.zero.shard_files import Ranges, check_bytes, read_ranges
from sharding.zero.tables import SavedTensor, tensors_of


def read_state_dict(path: str | PathLike[str]) -> dict[str, Any]:
    """A checkpoint that ``ZeroRedundancyOptimizer.save`` wrote, as one torch.optim state dict.

    For one process: the plain optimizer of the same class, over the same parameters in the same
    groups, loads it. No pickle is read, and nothing is allocated before sizes, tables and checksums
    have been checked (of format version 1, which had no checksums, sizes and tables).

    State in other storages (``functional_optim.stored``) is decoded to float32, whatever it was.
    What was kept of a bfloat16 parameter stays under its name, ``master`` or ``compensation``,
    which torch.optim takes along and does not use: a plain optimizer over float32 parameters goes
    on from the master where that is copied into them, and from the rounded parameters otherwise.

    Args:
        path: the folder.

    Returns:
        ``{"state": ..., "param_groups": ...}``, its tensors on the CPU.

    Raises:
        FileNotFoundError: no checkpoint was completed there.
        ValueError: a damaged or missing file, or another format.

    Example::

        >>> import tempfile
        >>> import torch.distributed as dist
        >>> from sharding import ZeroRedundancyOptimizer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> zero = ZeroRedundancyOptimizer([("w", w)], torch.optim.AdamW, lr=0.1)
        >>> w.grad = torch.ones(2)
        >>> zero.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     zero.save(folder)
        ...     state_dict = read_state_dict(folder)
        >>> plain = torch.optim.AdamW([w])
        >>> plain.load_state_dict(state_dict)
        >>> int(plain.state[w]["step"]), plain.param_groups[0]["lr"]
        (1, 0.1)
        >>> dist.destroy_process_group()
    """
    folder = Path(path)
    manifest = manifest_of(folder)
    saved = tensors_of(folder, manifest)
    check_bytes(folder, manifest.shards)
    entries: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _tensors(folder, saved).items():
        name, _, field = key.rpartition("/")
        entries.setdefault(name, {})[field] = tensor
    if manifest.stored:
        entries = {name: decoded(one, manifest.fields) for name, one in entries.items()}
    paths = [name for group in manifest.groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(paths)}
    written = {
        numbers[name]: as_class_writes(
            one, manifest.schema, manifest.fields, starts_late=name in manifest.starts_late
        )
        for name, one in entries.items()
    }
    groups = [
        {
            **group["options"],
            **manifest.extra,
            "params": [numbers[name] for name in group["params"]],
        }
        for group in manifest.groups
    ]
    return {
        "state": {number: written[number] for number in sorted(written) if written[number]},
        "param_groups": with_group_steps(written, groups),
    }


def _tensors(folder: Path, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """All of them, whole."""
    flat = {
        key: torch.empty(one.numel, dtype=one.dtype, device="cpu") for key, one in saved.items()
    }
    wanted = {
        key: Ranges(saved[key].shape, {0: into}) for key, into in flat.items() if into.numel()
    }
    read_ranges(wanted, folder, saved)
    return {key: into.view(saved[key].shape) for key, into in flat.items()}
