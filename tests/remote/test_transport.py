"""Laws of every transport, over threads; other folders test them over RPC and Ray."""

import sys

import pytest
import torch

import sharding
from functional_optim import DistributedOptimizer, sgd
from functional_optim.remote import RayTransport, ThreadTransport

from .laws import LAWS
from .support import parameters, placement
from .transports import WANTED, Shelf, tried


def test_threads_place_call_and_fail() -> None:
    transport = ThreadTransport()
    assert tried(transport, "one") == WANTED
    transport.close()
    with pytest.raises(RuntimeError, match="'one' is closed"):
        transport.place("one", Shelf, torch.ones(1))


@pytest.mark.parametrize("law", LAWS)
def test_laws_of_every_transport(law: str) -> None:
    LAWS[law](DistributedOptimizer.over_threads)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for make in (
        RayTransport,
        lambda: DistributedOptimizer.over_ray(sgd, parameters(), placement(2)),
    ):
        with pytest.raises(ImportError, match=r'pip install "functional-optim\[ray\]"'):
            make()


def test_a_worker_that_owns_nothing_is_none() -> None:
    """A plan can have more ranks than parameters; the error names the existing workers."""
    plan = sharding.plan(parameters(), 6, "greedy")
    optimizer = DistributedOptimizer.over_threads(sgd, parameters(), plan)
    assert len(optimizer.workers) == 4
    without = next(name for name in map("rank{}".format, range(6)) if name not in optimizer.workers)
    with pytest.raises(ValueError, match=rf"names of workers.*got .*{without}.*; there are 'rank"):
        optimizer.snapshot(workers=[without])
    optimizer.close()


def test_state_and_snapshots_of_some_workers() -> None:
    optimizer = DistributedOptimizer.over_threads(sgd, parameters(), placement(2), momentum=0.5)
    saved = optimizer.state_dict(workers=["ps1"])
    assert saved["workers"] == {"ps1": ["hidden.weight", "scale"]}
    assert list(saved["state"]) == [1, 3]
    assert list(optimizer.snapshot(workers=["ps1"]).parameters) == ["hidden.weight", "scale"]
    for wrong in (["ps2"], "ps1"):
        with pytest.raises(ValueError, match="there are 'ps0', 'ps1'"):
            optimizer.state_dict(workers=wrong)
    optimizer.close()
