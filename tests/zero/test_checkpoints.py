"""Checkpoints that do not fit are refused, and say why; what a save leaves; on threads."""

import copy
import os
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from functional_optim import sgd
from sharding import ZeroRedundancyOptimizer, read_state_dict
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.choices import case
from tests.zero_local.compare import difference

from .towers import both, give, made, plain, raised, tower


def test_saved_twice_and_read_by_the_plain_optimizer(tmp_path: Path) -> None:
    """The last one is left: a file of bytes and one of JSON for each rank, and no pickle."""

    def law(group: LocalGroup) -> None:
        _, zero = tower("adam", group, "elements", views=True)
        reference = made()
        other = plain("adam", reference)
        for step in range(2):
            both(zero, other, reference, range(step, step + 1))
            zero.save(tmp_path)
            zero.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.25
        zero.save(tmp_path)
        zero.load(tmp_path)
        zero.consolidate_state_dict(to=0)
        if group.rank() == 0:
            found = read_state_dict(tmp_path)
            assert difference(found["state"], zero.state_dict()["state"]) == []
            again = plain("adam", made())
            again.load_state_dict(found)
            assert difference(again.state_dict(), other.state_dict()) == []

    with ExitStack() as stack:  # here, and not in a thread: it is of the whole process
        for name in ("dump", "dumps", "load", "loads"):
            stack.enter_context(mock.patch.object(pickle, name, None))
        LocalWorld(3).run(law)
    names = sorted(path.suffix for path in tmp_path.iterdir())
    assert names == [".bin"] * 3 + [".json"] * 4


def test_what_was_never_stepped_is_read_as_it_is_consolidated(tmp_path: Path) -> None:
    """torch's SGD would take a buffer of zeros for one of a later step, and dampen the first."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}

    def law(group: LocalGroup) -> None:
        ours, theirs = ([nn.Parameter(torch.ones(2)) for _ in range(2)] for _ in range(2))
        zero = ZeroRedundancyOptimizer(ours, sgd(**options), group)
        other = torch.optim.SGD(theirs, **options)
        ours[0].grad = theirs[0].grad = torch.ones(2)
        zero.step()
        zero.save(tmp_path)
        zero.consolidate_state_dict()
        found = read_state_dict(tmp_path)
        assert difference(found["state"], zero.state_dict()["state"]) == []
        other.step()
        again = torch.optim.SGD([one.detach().clone().requires_grad_() for one in theirs])
        again.load_state_dict(found)
        for optimizer in (other, again):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones(2)
            optimizer.step()
        pairs = zip(theirs, again.param_groups[0]["params"], strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)

    LocalWorld(1).run(law)


REFUSED = {
    "missing": "it lacks 'new'",
    "extra": "it has 'unused.bias', which this optimizer has not",
    "groups": "groups of [5, 5] parameters, this optimizer of [10]",
    "class": "this optimizer keeps step, sum",
    "options": "decoupled_weight_decay is True for AdamW, and cannot be False",
}


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    world = LocalWorld(2)

    def begin(group: LocalGroup) -> Any:
        _, zero = tower("adam", group)
        give(zero, 0)
        zero.step()
        assert "FileNotFoundError" in raised(zero.load, tmp_path / "nothing")
        zero.save(saved)
        zero.consolidate_state_dict(to=0)
        return zero, copy.deepcopy(zero.state_dict()) if zero.rank == 0 else None

    begun = world.run(begin)

    def refused(group: LocalGroup, what: str) -> str:
        named = list(made().named_parameters())
        params: Any = {
            "missing": [*named, ("new", nn.Parameter(torch.ones(2)))],
            "extra": named[:-1],
            "groups": named,
        }.get(what)
        if params is None:
            other = tower({"class": "adagrad", "options": "adamw"}[what], group)[1]
        else:
            other = ZeroRedundancyOptimizer(params, torch.optim.Adam, group, executor="blocked")
        return raised(other.load, saved)

    for what, told in REFUSED.items():
        with case(what=what):
            texts = world.run(lambda group, what=what: refused(group, what))
            assert all(told in text for text in texts), texts
    (tmp_path / "file").write_text("")
    blocked = world.run(lambda group: raised(begun[group.rank()][0].save, tmp_path / "file" / "x"))
    assert all("Error" in text for text in blocked)
    largest = max(saved.glob("*.bin"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 4)
    damaged = world.run(lambda group: raised(begun[group.rank()][0].load, saved))
    assert all("it was damaged" in text for text in damaged)

    def unchanged(group: LocalGroup) -> None:
        zero, before = begun[group.rank()]
        zero.consolidate_state_dict(to=0)
        assert group.rank() or difference(zero.state_dict(), before) == []

    world.run(unchanged)


def test_a_rate_that_a_scheduler_has_set_is_collected() -> None:
    """It was taken from the optimizer of the shard, which hears of it with the next step."""

    def law(group: LocalGroup) -> None:
        _, zero = tower("adam", group)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, 0.5)
        give(zero, 0)
        zero.step()
        scheduler.step()
        rates = [one["lr"] for one in zero.param_groups]
        zero.consolidate_state_dict(to=0)
        assert [one["lr"] for one in zero.param_groups] == rates == [0.005, 0.015]
        assert group.rank() or [one["lr"] for one in zero.state_dict()["param_groups"]] == rates

    LocalWorld(2).run(law)
