"""Small checkpoints of three ranks, written in one process in the format of three processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from sharding.checkpoint.flat_ranges import FlatRanges
from sharding.storage import ChecksumReader, ChecksumWriter
from sharding.storage.files import DurableFiles
from tests.checkpoints import write_parts

RANKS = 3


def part(rank: int, version: int) -> dict[str, Any]:
    """Return the state of one rank: a range of a tensor, a whole tensor, and an option."""
    own = torch.arange(4.0) + 4 * rank + 100 * version
    ranges = FlatRanges((3, 4), {4 * rank: own}, torch.float32, "cpu", f"rank {rank}")
    return {"w": ranges, "b": torch.tensor(float(version)), "lr": 0.5 * version}


def writers(folder: Path, disk: DurableFiles | None = None) -> list[ChecksumWriter]:
    """Return the writers of three ranks; all of them use the given disk."""
    made = [ChecksumWriter(folder) for _ in range(RANKS)]
    for one in made:
        one.fs = disk or one.fs
    return made


def save(folder: Path, version: int, disk: DurableFiles | None = None) -> None:
    write_parts([part(rank, version) for rank in range(RANKS)], folder, writers(folder, disk))


def load(folder: Path, reader: Any = None) -> dict[str, Any]:
    """Return the content of a checkpoint.

    Raises:
        CheckpointException: the checkpoint cannot be loaded.
    """
    state: dict[str, Any] = {"w": torch.full((3, 4), -1.0), "b": torch.tensor(-1.0), "lr": -1.0}
    try:
        _load_state_dict(state, reader or ChecksumReader(folder), no_dist=True)
    except CheckpointException:
        assert state["lr"] == -1.0
        assert torch.equal(state["w"], torch.full((3, 4), -1.0))
        raise
    return state


def version_of(folder: Path) -> int:
    """Return the version of a checkpoint, and check that all its values are from one save."""
    state = load(folder)
    version = int(state["b"])
    assert same(state["w"], torch.arange(12.0).view(3, 4) + 100 * version)
    assert state["lr"] == 0.5 * version
    return version


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def files_of(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir())
