"""Checkpoints of any number of ranks, read by one process for a plain torch.optim optimizer."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.storage.plain import decoded
from functional_optim.torch_checkpoint import torch_step, with_group_steps
from sharding.plan_json import dtype_named
from sharding.zero.files import Saved, index_of, read_tensor, tensors_of
from sharding.zero.recipe import Form


def read_state_dict(path: str | PathLike[str]) -> dict[str, Any]:
    """A checkpoint that ``ZeroRedundancyOptimizer.save`` wrote, as one torch.optim state dict.

    For one process: the plain optimizer of the same class, over the same parameters in the same
    groups, loads it. No pickle is read.

    State in other storages (``functional_optim.stored``) is decoded to float32, whatever it was.
    What was kept of a bfloat16 parameter stays under its name, ``master`` or ``compensation``,
    which torch.optim takes along and does not use: a plain optimizer over float32 parameters goes
    on from the master where that is copied into them, and from the rounded parameters otherwise.

    Args:
        path: the folder.

    Returns:
        ``{"state": ..., "param_groups": ...}``, its tensors on the CPU.

    Raises:
        FileNotFoundError: no checkpoint was completed there, or a file is missing.
        ValueError: a damaged file, or another format.

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
    index = index_of(folder)
    saved = tensors_of(folder, index["shards"])
    entries: dict[str, dict[str, Tensor]] = {}
    for key, one in saved.items():
        name, _, field = key.rpartition("/")
        entries.setdefault(name, {})[field] = _read(folder, one)
    if index.get("stored", False):
        entries = {name: decoded(one, index["fields"]) for name, one in entries.items()}
    paths = [name for group in index["groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(paths)}
    form = Form(**index["form"])
    written = {numbers[name]: _as_torch(one, form) for name, one in entries.items()}
    groups = [
        {
            **group["options"],
            **index["extra"],
            "params": [numbers[name] for name in group["params"]],
        }
        for group in index["groups"]
    ]
    return {
        "state": {number: written[number] for number in sorted(written) if written[number]},
        "param_groups": with_group_steps(written, groups),
    }


def _read(folder: Path, saved: Saved) -> Tensor:
    """A whole tensor."""
    flat = torch.empty(saved.numel, dtype=dtype_named(saved.dtype), device="cpu")
    for offset, length, file, begin in saved.chunks:
        with (folder / f"{file}.bin").open("rb", buffering=0) as data:
            read_tensor(data, begin, flat[offset : offset + length])
    return flat.view(saved.shape)


def _as_torch(entries: Mapping[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Entries as the class meant writes them."""
    step = entries["step"]
    rest = {key: value for key, value in entries.items() if key != "step"}
    if int(step) == 0 and not form.eager:
        return {}
    return {"step": torch_step(step), **rest} if form.counts_steps else rest
