"""Tests on threads of checkpoints between storages and between numbers of ranks."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from functional_optim import chain, clip_by_global_norm, sgd, stored
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests import checkpoints
from tests.choices import EVERYTHING, case
from tests.zero_local.compare import differing, same

from .storages import (
    SHAPES,
    STORAGES,
    Plain,
    base,
    give,
    grads,
    made,
    twin_of,
    values,
    wanted_of,
    wrong_state,
)
from .towers import raised

NAMES = list(STORAGES)
OPTIONS = {"lr": 0.01, "amsgrad": True}


class Saved(NamedTuple):
    """Checkpoint of two ranks after three steps."""

    folder: Path
    state_dict: dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Return the checkpoints by storage, after training on two ranks that matches one process."""
    found = {}
    for storage in STORAGES:
        folder = tmp_path_factory.mktemp("storages")

        def trains(group: LocalGroup, storage: str = storage, folder: Path = folder) -> Any:
            zero = made(storage, group, "elements", views=True, start=values(torch.float32))
            for step in range(3):
                give(zero, step)
                zero.step()
            assert differing(zero.params, twin_of(storage, 3)[0]) == []
            checkpoints.save(zero, folder)
            zero.consolidate_state_dict(to=1)
            return zero.state_dict() if group.rank() == 1 else None

        found[storage] = Saved(folder, LocalWorld(2).run(trains)[1])
    return found


def kept_of(storage: str) -> str:
    """Return the storage of the parameter."""
    return str(STORAGES[storage].get("param", "float32"))


def targets(source: str) -> list[str]:
    """Return the storages to load into: all of them, or the source and another.

    Values of float32 are between the two storages, so each storage is written once and read once.
    """
    other = NAMES[(NAMES.index(source) + 2) % len(NAMES)]
    exact = ["float32"] if source == "master" else []
    return NAMES if EVERYTHING else list(dict.fromkeys([source, other, *exact]))


@pytest.mark.parametrize("source", STORAGES)
def test_from_any_storage_into_any(saved: dict[str, Saved], source: str) -> None:
    """Checkpoints and state dicts load into each storage, and training goes on with equal bits."""
    params = twin_of(source, 3)[0]
    for number, storage in enumerate(targets(source)):
        wanted = wanted_of(source, storage)
        policy, views = ("greedy", "elements")[number % 2], number % 3 == 0

        def loads(group: LocalGroup, to: Any = (storage, policy, views, wanted)) -> None:
            storage, policy, views, wanted = to
            by_dict, other = (made(storage, group, policy, views, params) for _ in range(2))
            by_dict.load_state_dict(saved[source].state_dict)
            by_file = by_dict
            if kept_of(source) == kept_of(storage):  # files hold state by name
                by_file = other
                checkpoints.load(by_file, saved[source].folder)
            assert wrong_state(by_file, wanted) == []
            assert wrong_state(by_dict, wanted) == []
            for zero in {id(one): one for one in (by_file, by_dict)}.values():
                give(zero, 3)
                zero.step()
            assert differing(by_file.params, by_dict.params) == []
            if source == storage or (source, storage) == ("master", "float32"):
                # The run continues as if never interrupted. Steps with a master are float32 steps.
                never, state = twin_of(source, 4)
                if storage == "float32":
                    never = {n: Plain(source, p, state.leaves[n]).value for n, p in never.items()}
                assert differing(by_file.params, never) == []

        with case(storage=storage):
            LocalWorld((1, 3)[number % 2]).run(loads)


@pytest.mark.parametrize("storage", ["state int8", "state mixed", "smallest"])
def test_codes_of_an_earlier_release(storage: str) -> None:
    """A state dict with codes and their scales is decoded, and each rank takes its ranges."""
    params = twin_of(storage, 3)[0]
    wanted = wanted_of(storage, storage)
    entries = [{"step": torch.tensor(3.0), **state} for _, state in wanted.values()]

    def loads(group: LocalGroup) -> int:
        zero = made(storage, group, "elements", views=False, start=params)
        groups = [{**zero.param_groups[0], "params": list(range(len(entries)))}]
        zero.load_state_dict({"state": dict(enumerate(entries)), "param_groups": groups})
        assert wrong_state(zero, wanted) == []
        return max(one.start for one in zero.owned)

    assert max(LocalWorld(3).run(loads)) >= 512  # a range that begins after the first two blocks


@pytest.mark.parametrize("source", STORAGES)
def test_into_torchs_class_and_back(saved: dict[str, Saved], source: str) -> None:
    """State dicts go to torch.optim.AdamW and back, and to a sharded torch.optim.AdamW."""
    params, state = twin_of(source, 3)
    plain = {n: Plain(source, p, state.leaves[n]) for n, p in params.items()}
    found = saved[source].state_dict

    def law(group: LocalGroup) -> None:
        start = {n: nn.Parameter(one.value.clone()) for n, one in plain.items()}
        other = torch.optim.AdamW(start.values(), foreach=False, **OPTIONS)
        other.load_state_dict(copy.deepcopy(found))
        for one, entries in zip(plain.values(), other.state.values(), strict=True):
            assert [f for f, value in one.fields.items() if not same(entries[f], value)] == []
        back = made(source, group, "elements", views=False, start=params)
        back.load_state_dict(other.state_dict())
        assert wrong_state(back, wanted_of(source, source)) == []
        sharded = of_class(group, params, policy="elements")
        sharded.load_state_dict(found)
        for name, param in start.items():
            param.grad = grads(torch.float32, 3)[name]
        give(sharded, 3)
        other.step()
        sharded.step()
        assert differing(sharded.params, start) == []

    LocalWorld(2).run(law)


def of_class(group: LocalGroup, start: dict[str, torch.Tensor], **options: Any) -> Any:
    """Return a sharded torch.optim.AdamW over float32 parameters with these values."""
    named = [(n, nn.Parameter(p.to(torch.float32, copy=True))) for n, p in start.items()]
    options = {"executor": "blocked", **OPTIONS, **options}
    return ZeroRedundancyOptimizer(named, torch.optim.AdamW, group, **options)


def whole_state(zero: Any) -> dict[str, Any]:
    """Return the state of all ranks, on each rank. Collective."""
    found = {}
    for to in range(zero.process_group.size()):
        zero.consolidate_state_dict(to)
        if zero.rank == to:
            found = copy.deepcopy(zero.state_dict())
    return found


def test_from_torchs_class() -> None:
    """The state of torch's class loads into every storage; state that does not fit is refused."""

    def law(group: LocalGroup) -> None:
        start, params = values(torch.float32), twin_of("float32", 3)[0]
        zero = of_class(group, start)
        for step in range(3):
            give(zero, step)
            zero.step()
        of_plain = whole_state(zero)
        for storage in STORAGES:
            into = made(storage, group, "elements", views=False, start=params)
            into.load_state_dict(of_plain)
            assert wrong_state(into, wanted_of("float32", storage)) == [], storage
        norm = stored(chain(clip_by_global_norm(1.0), base()), state="int8")
        clipped = made(norm, group, "greedy", False, params)
        assert raised(clipped.load_state_dict, of_plain) == "nothing"  # the clip has no state
        other = made(
            stored(sgd(lr=0.1, momentum=0.9), state="int8"), group, "greedy", False, params
        )
        told = "this checkpoint has decoupled weight decay"
        assert told in raised(other.load_state_dict, of_plain)
        ascends = of_class(group, start, maximize=True)
        give(ascends, 0)
        ascends.step()
        into = made("state int8", group, "greedy", False, params)
        into.load_state_dict(whole_state(ascends))
        assert into.param_groups[0]["maximize"] is True
        before = {name: param.detach().clone() for name, param in into.params.items()}
        unknown = {"state": {}, "param_groups": [{"params": [*range(len(SHAPES))], "trust": True}]}
        told = "the state dict has trust=True, which this optimizer does not have"
        assert told in raised(into.load_state_dict, unknown)
        assert differing(into.params, before) == []

    LocalWorld(2).run(law)


def test_whatever_the_default_device() -> None:
    """Steps and checkpoints do not depend on torch's default device."""

    def law(group: LocalGroup) -> None:
        wanted = wanted_of("state int8", "state int8")
        zero = made("state int8", group, "elements", views=True, start=values(torch.float32))
        params = twin_of("state int8", 3)[0]
        other = made("state int8", group, "greedy", views=False, start=params)
        given = [grads(torch.float32, step) for step in range(3)]
        with torch.device("meta"):
            for step in range(3):
                for name, param in zero.params.items():
                    param.grad = given[step][name].clone()
                zero.clip_grad_norm_(1e9)
                zero.step()
            other.load_state_dict(whole_state(zero))
            assert wrong_state(other, wanted) == []

    LocalWorld(2).run(law)
