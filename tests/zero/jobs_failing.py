"""What the ranks do while one of them fails or dies in a save, a load, or where state is collected.

The timeout of the group is far away: a rank that waited for it would be taken for a hang. The rank
that dies ends with the code of one that ends well, so that the others have their time.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from sharding import ZeroRedundancyOptimizer, read_state_dict
from sharding.zero import checkpoint, state_dict, stream

from .jobs_more import Halving, give, tower
from .saved import same

FAR = 3600.0
"""Seconds of a group's timeout: far more than a launch has."""
ERRORS: dict[str, Callable[[], BaseException]] = {
    "full disk": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "CheckpointException": lambda: CheckpointException("write", {}),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit("enough"),
}


def trained(steps: int, policy: str = "elements") -> ZeroRedundancyOptimizer:
    _, zero = tower("adamw", policy)
    for step in range(steps):
        give(zero, step)
        zero.step()
    return zero


def raised(action: Callable[[], Any]) -> str:
    """What a call raises, an interrupt too: ``Type: text``."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001  the test says which it should be
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def failing(place: Any, name: str, ranks: list[int], error: Callable[[], Any]) -> Iterator[None]:
    """A function of ours raises on some ranks."""
    if dist.get_rank() not in ranks:
        yield
        return
    with mock.patch.object(place, name, side_effect=lambda *_, **__: _raise(error())):
        yield


def _raise(error: BaseException) -> None:
    raise error


def fails(folder: str, what: str) -> dict[str, Any]:
    """One rank cannot write, and one cannot read; the group, and all state, are as before."""
    before, after = trained(1), trained(3)
    path = Path(folder, what.replace(" ", "_"))
    before.save(path)
    whole = read_state_dict(path)
    dist.barrier()
    seen: dict[str, Any] = {}
    with failing(checkpoint, "_saved_ranges", [1], ERRORS[what]):
        seen["save"] = raised(lambda: after.save(path))
    seen["kept"] = same(read_state_dict(path), whole)
    dist.barrier()
    before.consolidate_state_dict(to=0)
    kept = before.state_dict() if before.rank == 0 else None
    after.save(path)
    with failing(checkpoint, "_checked", [1], ERRORS[what]):
        seen["load"] = raised(lambda: before.load(path))
    before.consolidate_state_dict(to=0)
    seen["unchanged"] = kept is None or same(before.state_dict(), kept)
    with failing(checkpoint, "_checked", [0, 2], ERRORS[what]):
        seen["several"] = raised(lambda: before.load(path))
    before.load(path)
    dist.barrier()
    seen["files"] = len(list(path.iterdir()))
    return seen


def begins(folder: str) -> list[str]:
    """The first rank cannot begin: a file has the folder's name, or a stranger the manifest's."""
    zero = trained(1)
    file, other = Path(folder, "file"), Path(folder, "other")
    if zero.rank == 0:
        file.write_text("")
        other.mkdir()
        (other / "checkpoint.json").write_text('{"epoch": 3}')
    dist.barrier()
    seen = [raised(lambda: zero.save(file)), raised(lambda: zero.save(other))]
    dist.barrier()
    assert (other / "checkpoint.json").read_text() == '{"epoch": 3}'
    return seen


def plans() -> str:
    """A rank is interrupted while its optimizer is made."""
    from sharding.zero import optimizer

    with failing(optimizer, "planned", [1], KeyboardInterrupt):
        return raised(lambda: tower("adamw"))


def collects() -> dict[str, Any]:
    """One rank has state that cannot travel, or says that another is to have it."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    zero = ZeroRedundancyOptimizer(params, Halving)
    for param in params:
        param.grad = torch.ones(3)
    zero.step()
    rank = dist.get_rank()
    seen = {"to": raised(lambda: zero.consolidate_state_dict(to=rank % 2))}
    if rank == 1:
        next(iter(zero.optim.state.values()))["odd"] = object()
    seen["object"] = raised(zero.consolidate_state_dict)
    return seen


def dies_in(folder: str, what: str) -> dict[str, Any]:
    """One rank dies: before a step, in its part of a save or a load, before its state is collected,
    or while it sends that."""
    rank, dying = dist.get_rank(), 1
    zero = trained(2)
    path = Path(folder, "saved")
    zero.save(path)
    give(zero, 3)
    place, name, action = {
        "step": (zero, "_find_memory", zero.step),
        "save": (checkpoint, "write_shard", lambda: zero.save(path)),
        "load": (checkpoint, "check_bytes", lambda: zero.load(path)),
        "collect": (state_dict, "own_portions", zero.consolidate_state_dict),
        "sending": (stream.Stream, "send", zero.consolidate_state_dict),
    }[what]
    function = getattr(place, name)
    calls = []

    def dies(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if what != "sending" or len(calls) == 2:  # the first says how much is to come
            os._exit(0)
        return function(*arguments, **options)

    if rank == dying:
        mock.patch.object(place, name, dies).start()
    error = raised(action)
    if what == "step":  # others may wait for pieces of a rank that has failed, until it is gone
        return {"error": error}
    # Whoever left would be gone, too, for those that have not noticed yet.
    Path(folder, f"told {rank}").write_text(error)
    while not all(
        Path(folder, f"told {r}").exists() for r in range(dist.get_world_size()) if r != dying
    ):
        time.sleep(0.01)
    return {"error": error}
