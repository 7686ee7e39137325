"""Tests that ZeRO and torch.optim load folders of the old format, and that they are converted."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import TorchOptimizer, accumulate, adamw, chain, stored
from sharding import ZeroRedundancyOptimizer, read_state_dict
from sharding.storage import ChecksumReader
from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.commands.support import failed, shown
from tests.zero.towers import raised
from tests.zero_local import saved as small
from tests.zero_local.compare import difference, differing

from .forgery import SAVED

SHAPES = {"wide": (5, 7), "long": (300,), "number": (), "none": (0, 3), "late": (4,)}
BEFORE, AFTER = 2, 4
"""Number of steps before the checkpoint, and number of all steps."""
MADE: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "adamw": lambda: (torch.optim.AdamW, {"lr": 0.7, "amsgrad": True}),
    "stored": lambda: (stored(adamw(lr=0.7), param="bfloat16+master", state="int8"), {}),
    "unnamed": lambda: (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
    "accumulated": lambda: (chain(accumulate(3), adamw(lr=0.7)), {}),
}
"""Optimizers that were saved, with another rate here, since the load restores the rate."""


class Model(nn.Module):
    """Model with the saved parameters."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(values[name].clone()))


def wanted(name: str) -> dict[str, Any]:
    """Return the state at the checkpoint, and the parameters before and after the later steps."""
    found: dict[str, Any] = torch.load(SAVED / f"{name}.pt")
    return found


def groups_of(model: nn.Module, name: str) -> Any:
    named = list(model.named_parameters())
    if name == "unnamed":
        return list(model.parameters())
    return [{"params": named[:2]}, {"params": named[2:]}]


def zero_of(model: nn.Module, name: str, group: Any = None, policy: str = "greedy") -> Any:
    what, options = MADE[name]()
    groups, how = groups_of(model, name), {"executor": "blocked", "policy": policy, **options}
    return ZeroRedundancyOptimizer(groups, what, group, **how)


def step(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Make the steps after the checkpoint, and return the parameters."""
    for number in range(BEFORE, AFTER):
        chance = torch.Generator().manual_seed(100 + number)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance).to(param.dtype)
        optimizer.step()
    return {path: param.detach() for path, param in model.named_parameters()}


@functools.cache
def stepped_alone(name: str) -> dict[str, torch.Tensor]:
    """Return the parameters after the later steps, made on one process from the saved state.

    They are close to those of the saved run, whose machine may have rounded otherwise.
    """
    model, (what, options) = Model(wanted(name)["before"]), MADE[name]()
    groups = groups_of(model, name)
    is_class = isinstance(what, type)
    optimizer = what(groups, foreach=False, **options) if is_class else TorchOptimizer(groups, what)
    optimizer.load_state_dict(wanted(name)["state_dict"])
    found = step(model, optimizer)
    torch.testing.assert_close(found, {key: wanted(name)["after"][key] for key in found})
    return found


def goes_on(model: nn.Module, optimizer: Any, name: str) -> None:
    """Make two more steps, and compare them with a run from the saved state, bit for bit."""
    assert differing(step(model, optimizer), stepped_alone(name)) == []


@pytest.mark.parametrize("name", MADE)
def test_it_is_the_state_of_the_run(name: str) -> None:
    assert difference(read_state_dict(SAVED / name), wanted(name)["state_dict"]) == []


@pytest.mark.parametrize("name", MADE)
def test_zero_goes_on_with_any_number_of_ranks(name: str) -> None:
    for ranks, policy in ((1, "greedy"), (2, "elements"), (4, "greedy")):

        def trains(group: Any, policy: str = policy) -> None:
            model = Model(wanted(name)["before"])
            zero = zero_of(model, name, group, policy)
            zero.load(SAVED / name)
            assert zero.param_groups[-1]["lr"] in (0.1, 0.3)
            goes_on(model, zero, name)

        with case(ranks=ranks, policy=policy):
            LocalWorld(ranks).run(trains)


@pytest.mark.parametrize("name", ["adamw", "unnamed"])
def test_torch_optim_goes_on(name: str) -> None:
    model = Model(wanted(name)["before"])
    cls, options = MADE[name]()
    groups = groups_of(model, name)
    plain = cls(groups, foreach=False, **options)
    plain.load_state_dict(read_state_dict(SAVED / name))
    goes_on(model, plain, name)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", MADE)
def test_converted_it_is_a_distributed_checkpoint(name: str, tmp_path: Path) -> None:
    """A folder is converted; parameters without names need the names of a model."""
    given = ("convert", SAVED / name, tmp_path / "new")
    if name == "unnamed":
        assert "has no names of parameters" in failed(1, *given)
        assert not (tmp_path / "new").exists()
        entries = ", ".join(f'{{"path": "{k}", "shape": {list(v)}}}' for k, v in SHAPES.items())
        (tmp_path / "model.json").write_text(f"[{entries}]")
        given = (*given, "--model", tmp_path / "model.json")
    shown(*given)
    assert "distributed checkpoint, 1 files: 5" in shown("inspect", tmp_path / "new", "--verify")
    model = Model(wanted(name)["before"])
    zero = zero_of(model, name)
    state = {"optim": get_optimizer_state_dict(model, zero)}
    dcp.load(state, storage_reader=ChecksumReader(tmp_path / "new"))
    set_optimizer_state_dict(model, zero, state["optim"])
    goes_on(model, zero, name)


def test_converted_to_a_file(tmp_path: Path) -> None:
    shown("convert", SAVED / "adamw", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert difference(found, wanted("adamw")["state_dict"]) == []


def test_what_does_not_fit_is_named() -> None:
    """The error names the parameter, and a refused load changes nothing."""
    (group,) = LocalWorld(1).groups
    model = Model(wanted("adamw")["before"])
    named = list(model.named_parameters())
    more = [*named, ("new", nn.Parameter(torch.ones(2)))]
    for params, told in (
        (groups_of(model, "adamw")[:1], "'number'"),
        ([{"params": named[:3]}, {"params": named[3:]}], "'number'"),
        ([{"params": more[1:3]}, {"params": more[3:]}], "'new'"),
    ):
        with case(told=told):
            zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, executor="blocked")
            before = small.state_of(zero)
            assert told in raised(zero.load, SAVED / "adamw")
            assert small.same(small.state_of(zero), before)
    other = ZeroRedundancyOptimizer(groups_of(model, "adamw"), torch.optim.Adagrad, group)
    assert "ValueError" in raised(other.load, SAVED / "adamw")
    assert "FileNotFoundError" in raised(other.load, SAVED / "nothing")


def test_a_checkpoint_of_the_first_version_is_read() -> None:
    """The first version has no checksums, but its sizes and tables are checked."""
    params = [
        ("a.weight", torch.nn.Parameter(torch.arange(6.0).view(2, 3))),
        ("b", torch.nn.Parameter(torch.tensor(2.0))),
        ("none", torch.nn.Parameter(torch.ones(0, 3))),
    ]
    plain = torch.optim.AdamW([param for _, param in params], lr=0.25, foreach=False)
    zero = small.sharded(params)
    for step in range(2):
        for _, param in params:
            param.grad = torch.full_like(param, 1.0 + step)
        plain.step()
    found = read_state_dict(SAVED / "version_1")
    assert small.same(found["state"], plain.state_dict()["state"])
    zero.load(SAVED / "version_1")
    assert small.same(small.state_of(zero)["state"], plain.state_dict()["state"])
    assert zero.param_groups[0]["lr"] == 0.25


def test_no_pickle_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_state_dict(SAVED / "adamw")["state"]) == 4
