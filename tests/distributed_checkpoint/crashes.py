"""Jobs in which ranks fail or are killed during a save, and jobs that load the rest."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from sharding.storage import ChecksumReader, ChecksumWriter
from sharding.storage.files import DurableFiles
from tests.zero.towers import raised
from tests.zero_local.compare import difference

from .laws import BEFORE, content, made, train

VICTIM = 1


def state_of(model: nn.Module, zero: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, zero)}


def write(model: nn.Module, zero: Any, folder: str, group: Any = None) -> None:
    writer = ChecksumWriter(folder)
    dcp.save(state_of(model, zero), storage_writer=writer, process_group=group)


def read(model: nn.Module, zero: Any, folder: str, group: Any = None) -> None:
    state, reader = state_of(model, zero), ChecksumReader(folder, group)
    dcp.load(state, storage_reader=reader, process_group=group)
    set_optimizer_state_dict(model, zero, state["optim"])


def killed_in_a_save(folder: str) -> None:
    """Save twice; kill one rank in the second save, before its file is synced.

    All other ranks must raise an error. tests/checkpoint_files kills a process at every moment.
    """
    model, zero = made("adamw", 0, "elements")
    train(zero, range(BEFORE))
    write(model, zero, folder)
    train(zero, range(BEFORE, BEFORE + 1))

    def dies(*arguments: Any, **options: Any) -> Any:
        os._exit(0)  # a killed process cleans up nothing

    if dist.get_rank() == VICTIM:
        mock.patch.object(DurableFiles, "sync", dies).start()
    assert raised(write, model, zero, folder) != "nothing"


def loads_the_first_save(folder: str) -> None:
    """Load the complete first save; a new save must remove the files of the killed rank."""
    model, zero = made("adamw", 0, "elements")
    train(zero, range(BEFORE))
    wanted = content(model, zero)
    other, again = made("adamw", 1, "greedy")
    read(other, again, folder)
    found = content(other, again)
    assert wanted is None or difference(found["optim"], wanted["optim"]) == []
    write(other, again, folder)
    read(other, again, folder)
    dist.barrier()
    assert len(list(Path(folder).iterdir())) == dist.get_world_size() + 2


def a_rank_fails(folder: str) -> list[str]:
    """Fail on one rank in a save, then in a load; checkpoint and state must not change.

    Return the errors of this rank.
    """
    model, zero = made("adamw", 0, "elements")
    train(zero, range(BEFORE))
    write(model, zero, folder)
    files = [*Path(folder).glob("*.distcp")]  # a failed save may leave other files
    train(zero, range(BEFORE, BEFORE + 1))
    before = content(model, zero)

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    is_victim = dist.get_rank() == VICTIM
    texts = []
    with mock.patch.object(DurableFiles, "sync", full if is_victim else DurableFiles.sync):
        texts.append(raised(write, model, zero, folder))
    dist.barrier()
    if dist.get_rank() == 0:
        damaged = max(files, key=lambda path: path.stat().st_size)
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    dist.barrier()
    texts.append(raised(read, model, zero, folder))
    assert difference(content(model, zero), before) == []
    dist.barrier()
    if dist.get_rank() == 0:
        damaged.write_bytes(whole)
    dist.barrier()
    read(model, zero, folder)
    return texts


def other_group_than_the_reader(folder: str) -> str:
    """Load with another group than that of the reader, and return the error."""
    model, zero = made("adamw", 0, "elements")
    write(model, zero, folder)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = {"model": model.state_dict()}
    reader = ChecksumReader(folder)
    return raised(dcp.load, state, storage_reader=reader, process_group=alone)


def on_subgroup(folder: str) -> None:
    """Save and load with two of four ranks, whose group ranks differ from the global ranks."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    model, zero = made("momentum", 0, "elements", group)
    train(zero, range(BEFORE))
    write(model, zero, folder, group)
    wanted = content(model, zero)
    other, again = made("momentum", 1, "greedy", group)
    read(other, again, folder, group)
    found = content(other, again)
    assert wanted is None or difference(found["optim"], wanted["optim"]) == []


def in_the_background(folder: str) -> None:
    """Save with ``async_save`` while training continues; the saved state is that of the call."""
    model, zero = made("8-bit", 0, "elements")
    train(zero, range(BEFORE))
    before = content(model, zero)
    group = dist.new_group()  # training uses the default group at the same time
    for step in range(2):
        writer = ChecksumWriter(folder)
        state = state_of(model, zero)
        done = dcp.async_save(state, storage_writer=writer, process_group=group)
        train(zero, range(BEFORE + step, BEFORE + step + 1))
        done.result()
        other, again = made("8-bit", 1, "greedy")
        read(other, again, folder)
        found = content(other, again)
        assert before is None or difference(found["optim"], before["optim"]) == []
        before = content(model, zero)
