"""Tests that each kind of optimizer continues a run of every other kind, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from tests.ranks import Job, run_ranks
from tests.zero_local.compare import same

from .runs import (
    BEFORE,
    KINDS,
    RANKS,
    by_torch,
    folder_of,
    goes_on,
    never_stopped,
    passes_on,
    saves,
    train,
)

SECONDS = 90
CHAINS = ("TorchOptimizer", "MatrixOwnerOptimizer")


def on_ranks(count: int, function: object, **arguments: object) -> None:
    jobs = {"job": Job(function, arguments)}  # type: ignore[arg-type]
    for outcome in run_ranks(jobs, ranks=count, seconds=SECONDS)["job"]:
        outcome.result()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of one checkpoint of each kind."""
    base = tmp_path_factory.mktemp("saved")
    found = {kind: folder_of(base, kind) for kind in KINDS}
    for kind, folder in found.items():
        on_ranks(RANKS[kind][0], saves, kind=kind, folder=folder)
    return found


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_from_one_to_another(saved: dict[str, str], source: str, target: str) -> None:
    # A chain has fewer options than a class.
    partial = source in CHAINS and target not in CHAINS
    on_ranks(RANKS[target][1], goes_on, kind=target, folder=saved[source], partial=partial)


def test_from_one_to_the_next_through_all(tmp_path: Path) -> None:
    """One run goes through ZeRO, torch.optim and FSDP2, on 3, 1, 2, 2 and 4 ranks."""
    folders = [folder_of(tmp_path, number) for number in range(5)]
    on_ranks(3, saves, kind="ZeRO", folder=folders[0])
    route = [("torch.optim", 1), ("ZeRO", 2), ("FSDP2", 2), ("ZeRO", 4)]
    for number, (kind, ranks) in enumerate(route):
        where = {"folder": folders[number], "to": folders[number + 1]}
        on_ranks(ranks, passes_on, kind=kind, begins=BEFORE + number, **where)


def test_to_a_file_of_torch_save(saved: dict[str, str], tmp_path: Path) -> None:
    """``dcp_to_torch_save`` reads the checkpoints that ZeRO saves."""
    dcp_to_torch_save(saved["ZeRO"], tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    params, states = never_stopped(BEFORE)
    assert [name for name, one in params.items() if not same(found["model"][name], one)] == []
    for name, entries in found["optim"]["state"].items():
        assert entries.keys() == states[name].keys()
        assert [key for key, one in entries.items() if not same(one, states[name][key])] == []
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_from_a_file_of_torch_save(tmp_path: Path) -> None:
    """ZeRO loads a file of ``torch.save`` after torch's tool has converted it to a folder."""
    model, optimizer = by_torch(0, 0.1)
    train(model, optimizer, range(BEFORE))
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    torch.save(state, tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "folder")
    on_ranks(2, goes_on, kind="ZeRO", folder=str(tmp_path / "folder"))
