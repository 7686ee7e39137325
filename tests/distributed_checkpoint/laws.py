"""Jobs that save the state of ZeRO with any chain, and load it on other ranks."""

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from functional_optim import (
    accumulate,
    adafactor,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    matching,
    muon,
    partition,
    schedule_free_adamw,
    sgd,
    stored,
)
from sharding import POLICIES, ZeroRedundancyOptimizer
from sharding.checkpoint.flat_ranges import FlatRanges
from tests.composition.trees import kind
from tests.zero.towers import raised
from tests.zero_local.compare import difference, digest

from .runs import Net, gradients, load, net, save

STORAGES: dict[str, dict[str, str]] = {
    "8-bit": {"state": "int8"},
    "stochastic": {"state": "bfloat16+stochastic"},
    "master": {"param": "bfloat16+master", "state": "int8"},
    "kahan": {"param": "bfloat16+kahan"},
}
CHAINS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: adamw(lr=0.1, amsgrad=True),
    "sgd": lambda: sgd(lr=0.1),
    "momentum": lambda: sgd(lr=0.1, momentum=0.9, dampening=0.5),
    "schedule": lambda: sgd(lr=lambda step: 0.1 / (1 + step), momentum=0.9),
    "overrides": lambda: adamw(lr=0.1).override(matching("*.bias"), lr=0.01, weight_decay=0.0),
    "partition": lambda: partition({"matrices": muon(0.1), "rest": adamw(0.1)}, kind),
    "whole": lambda: adafactor(lr=0.1),
    "accumulated": lambda: chain(accumulate(3), adamw(lr=0.1)),
    "finite": lambda: chain(apply_if_finite(3), adamw(lr=0.1)),
    "clipped": lambda: chain(clip_by_global_norm(0.5), adamw(lr=0.1)),
    "schedule-free": lambda: schedule_free_adamw(lr=0.1),
    **{
        name: lambda options=options: stored(adamw(lr=0.1), **options)
        for name, options in STORAGES.items()
    },
}
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch.optim.SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "nesterov": False}),
    "torch.optim.Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
}
NAMES = [*CHAINS, *CLASSES]
LATE = "pictures.bias"
"""Parameter that has no gradient before the run stops."""
BEFORE, AFTER = 2, 3


def made(
    name: str, seed: int, policy: str, group: Any = None
) -> tuple[Net, ZeroRedundancyOptimizer]:
    """Return a model with names, and its ZeRO optimizer with two groups of parameters."""
    model = net(seed)
    if STORAGES.get(name, {}).get("param", "").startswith("bfloat16"):
        model.to(torch.bfloat16)
    what, options = CLASSES[name] if name in CLASSES else (CHAINS[name](), {})
    named = list(model.named_parameters())
    groups: Any = [
        {"params": [one for one in named if one[1].dim() > 1]},
        {"params": [one for one in named if one[1].dim() == 1]},
    ]
    if name in CLASSES:
        options = {**options, "lr": 0.2 * (1 + seed)}
        groups[1]["lr"] = 0.05 * (1 + seed)
    return model, ZeroRedundancyOptimizer(groups, what, group, policy=policy, **options)


def train(zero: ZeroRedundancyOptimizer, steps: range) -> None:
    for step in steps:
        for name, grad in gradients(zero.params, step).items():
            param = zero.params[name]
            unused = not param.requires_grad or (name == LATE and step < BEFORE)
            param.grad = None if unused else grad.to(param.dtype)
        zero.step()
        zero.zero_grad()


def content(model: nn.Module, zero: ZeroRedundancyOptimizer) -> Any:
    """Return the parameters, state and options of all ranks on rank 0, and None on other ranks."""
    zero.consolidate_state_dict(to=0)
    state = zero.state_dict() if zero.rank == 0 else None
    zero._collected = None  # a step does the same
    if state is None:
        return None
    groups = [
        {key: None if callable(one) else one for key, one in group.items()}
        for group in state["param_groups"]
    ]
    return copy.deepcopy({"model": model.state_dict(), "optim": {**state, "param_groups": groups}})


def saves(name: str, policy: str, folder: str) -> None:
    """Save, then continue training; the continued run is the reference for the loaded one."""
    model, zero = made(name, 0, policy)
    train(zero, range(BEFORE))
    before = digest(one for entries in zero.optim.state.values() for one in entries.values())
    save(model, zero, folder)
    now = digest(one for entries in zero.optim.state.values() for one in entries.values())
    assert now == before
    contents = [content(model, zero)]
    train(zero, range(BEFORE, BEFORE + AFTER))
    contents.append(content(model, zero))
    if zero.rank == 0:
        torch.save(contents, Path(folder, "wanted.pt"))


def goes_on(name: str, policy: str, folder: str) -> list[str]:
    """Load into a new run and train; return the differences from the run that did not stop."""
    model, zero = made(name, 1, policy)
    load(model, zero, folder)
    found = [content(model, zero)]
    train(zero, range(BEFORE, BEFORE + AFTER))
    found.append(content(model, zero))
    return [] if zero.rank else difference(found, torch.load(Path(folder, "wanted.pt")))


def other_data_on_every_rank(folder: str) -> str:
    """Save and load on the same ranks with different data; the results must be equal.

    The state is first replicated on each of two nodes, then sharded over all ranks. Gradients are
    summed parameter by parameter: DDP's sums depend on its buckets, and these change after the
    first iteration.
    """
    rank = dist.get_rank()
    runs = []
    replicas = functools.partial(POLICIES["hierarchical"], node_size=2, within="elements")
    for seed, policy in ((0, replicas), (1, "greedy")):
        model = Small(seed)
        named = model.named_parameters()
        runs.append((model, ZeroRedundancyOptimizer(named, torch.optim.AdamW, policy=policy)))

    def trained(run: int, steps: range) -> None:
        model, zero = runs[run]
        for step in steps:
            chance = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(3, 7, generator=chance)).square().sum().backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            zero.step()
            zero.zero_grad()

    trained(0, range(3))
    save(*runs[0], folder)
    trained(0, range(3, 5))
    load(*runs[1], folder)
    trained(1, range(3, 5))
    one, other = (content(*run) for run in runs)
    assert difference(one, other) == []
    return digest(runs[1][0].parameters())


class Small(nn.Sequential):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(7, 5), nn.Linear(5, 3))


def on_subgroup(folder: str) -> list[int] | None:
    """Save on ranks 1 and 3 of four, and load on ranks 3, 2 and 0; other ranks make no calls."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((1, 3), (0, 2, 3))}
    found = None
    if rank in (1, 3):
        group = groups[1, 3]
        model, zero = made("accumulated", 0, "elements", group)
        train(zero, range(BEFORE))
        save(model, zero, folder, group)
        train(zero, range(BEFORE, BEFORE + AFTER))
        wanted = content(model, zero)
        if zero.rank == 0:
            torch.save(wanted, Path(folder, "wanted.pt"))
    dist.barrier()
    if rank in (0, 2, 3):
        group = groups[0, 2, 3]
        model, zero = made("accumulated", 1, "elements", group)
        load(model, zero, folder, group)
        train(zero, range(BEFORE, BEFORE + AFTER))
        found = [zero.rank, zero.global_rank]
        last = content(model, zero)
        if zero.rank == 0:
            assert difference(last, torch.load(Path(folder, "wanted.pt"))) == []
    return found


def by_number(folder: str) -> None:
    """Pass the optimizer itself to ``dcp.save`` and ``dcp.load``."""
    model, zero = made("partition", 0, "elements")
    train(zero, range(BEFORE))
    dcp.save({"optim": zero}, checkpoint_id=folder)
    other, again = made("partition", 1, "greedy")
    dcp.load({"optim": again}, checkpoint_id=folder)
    other.load_state_dict(model.state_dict())
    for one in (zero, again):
        train(one, range(BEFORE, BEFORE + AFTER))
    assert difference(content(other, again), content(model, zero)) == []


def flattened(folder: str) -> None:
    """Use flat keys, as torchtitan does, with optimizers that have no parameter names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model = net(0)
    zero = ZeroRedundancyOptimizer(model.parameters(), adamw(lr=0.1), policy="elements")
    train(zero, range(BEFORE))
    written = get_optimizer_state_dict(model, zero, options=flat)
    assert "param_groups.last.bias.lr" in written
    dcp.save({"optim": written}, checkpoint_id=folder)
    other = net(1)
    again = ZeroRedundancyOptimizer(other.parameters(), adamw(lr=0.1))
    read = get_optimizer_state_dict(other, again, options=flat)
    dcp.load({"optim": read}, checkpoint_id=folder)
    set_optimizer_state_dict(other, again, read, options=flat)
    other.load_state_dict(model.state_dict())
    for one in (zero, again):
        train(one, range(BEFORE, BEFORE + AFTER))
    assert difference(content(other, again), content(model, zero)) == []


def with_missing_state(folder: str) -> None:
    """Load a checkpoint of torch.optim that lacks the state of a parameter that was never stepped.

    A partial load gives this parameter its initial state.
    """
    plain = net(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)

    def trained(params: dict[str, Any], stepper: Any, steps: range) -> None:
        for step in steps:
            for name, grad in gradients(params, step).items():
                if params[name].requires_grad and (name != LATE or step >= BEFORE):
                    params[name].grad = grad
            stepper.step()
            stepper.zero_grad()

    named = dict(plain.named_parameters())
    trained(named, optimizer, range(BEFORE))
    save(plain, optimizer, folder)
    model = net(1)
    zero = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, policy="elements", lr=0.3
    )
    before = content(model, zero)
    assert f"optim.state.{LATE}" in raised(load, model, zero, folder)
    assert difference(content(model, zero), before) == []
    load(model, zero, folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    for params, stepper in ((named, optimizer), (zero.params, zero)):
        trained(params, stepper, range(BEFORE, BEFORE + AFTER))
    for name, param in named.items():
        assert torch.equal(param, zero.params[name]), name


def every_range_is_offered_once(folder: str) -> list[list[Any]]:
    """Check that each rank offers exactly its own ranges of the state, and return these ranges."""
    model, zero = made("adamw", 0, "elements")
    train(zero, range(BEFORE))
    state = get_optimizer_state_dict(model, zero)["state"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [
            [name, start, start + value.numel()]
            for name, entries in state.items()
            if "exp_avg" in entries
            for start, value in entries["exp_avg"].ranges.items()
        ]
    own = [[one.path, one.start, one.stop] for one in zero.owned if one.path.find("frozen") < 0]
    assert sorted(found) == sorted(own)
    for entries in state.values():
        assert all(isinstance(one, FlatRanges) for one in entries.values())
    return found


def of_other_ranges(folder: str) -> list[str]:
    """Load parts of an optimizer with another plan; return the errors. Nothing may change."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model, zero = made("adamw", 0, "elements")
    other, again = made("adamw", 1, "greedy")
    third, cut = made("adamw", 1, "sliced")
    train(zero, range(BEFORE))
    texts = []
    for target, optimizer in ((other, again), (third, cut)):
        before = content(target, optimizer)
        given = get_optimizer_state_dict(model, zero)
        texts.append(raised(set_optimizer_state_dict, target, optimizer, given))
        assert difference(content(target, optimizer), before) == []
    return texts


def damaged(folder: str) -> list[str]:
    """Load a checkpoint of another optimizer, one of other shapes, and one with truncated files.

    Return the errors of this rank.
    """
    texts = []
    model, zero = made("adamw", 0, "elements")
    train(zero, range(BEFORE))
    save(model, zero, folder)
    other, again = made("adamw", 1, "elements")
    third = made("torch.optim.Adagrad", 1, "elements")
    before, kept = content(other, again), content(*third)

    texts.append(raised(load, *third, folder))
    assert difference(content(*third), kept) == []
    larger = Net()
    larger.last = nn.Linear(6, 3)
    wrong = ZeroRedundancyOptimizer(
        [{"params": list(larger.named_parameters())}], adamw(lr=0.1, amsgrad=True)
    )
    state = {"optim": get_optimizer_state_dict(larger, wrong)}
    texts.append(raised(dcp.load, state, checkpoint_id=folder))
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(folder).glob("*.distcp"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    dist.barrier()
    texts.append(raised(load, other, again, folder))
    found = content(other, again)  # torch may write to the tensors of the model
    assert found is None or difference(found["optim"], before["optim"]) == []
    return texts
