"""Jobs in which one process continues a run of ZeRO with a TorchOptimizer, and ZeRO that run."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from functional_optim import TorchOptimizer, adamw, sgd
from sharding import ZeroRedundancyOptimizer
from tests.zero_local.compare import difference

from . import laws
from .runs import Net, gradients, load, net, save

NAMES = ("schedule", "adamw", *laws.STORAGES)
"""Chains of :mod:`laws` that a TorchOptimizer continues."""
BACK = "back"
"""The folder in which the TorchOptimizer saves, in the folder from which it loads."""


def local(name: str, seed: int) -> tuple[Net, TorchOptimizer]:
    """Return the model and the groups of :func:`laws.made`, with a TorchOptimizer."""
    model = net(seed)
    if laws.STORAGES.get(name, {}).get("param", "").startswith("bfloat16"):
        model.to(torch.bfloat16)
    params = list(model.parameters())
    groups = [[one for one in params if one.dim() > 1], [one for one in params if one.dim() == 1]]
    return model, TorchOptimizer([{"params": own} for own in groups], laws.CHAINS[name]())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train with the gradients of :func:`laws.train`, which depend on the order of the groups."""
    names = {param: name for name, param in model.named_parameters()}
    params = {names[one]: one for group in optimizer.param_groups for one in group["params"]}
    for step in steps:
        for name, grad in gradients(params, step).items():
            param = params[name]
            unused = not param.requires_grad or (name == laws.LATE and step < laws.BEFORE)
            param.grad = None if unused else grad.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return parameters, and the state of parameters that were stepped."""
    state = stepped(optimizer.state_dict()["state"])
    return copy.deepcopy({"model": model.state_dict(), "state": state})


def stepped(states: dict[int, Any]) -> dict[int, Any]:
    return {key: entries for key, entries in states.items() if entries["step"] > 0}


def wanted_in(folder: str) -> list[Any]:
    """Return parameters and state of the run of ZeRO, when it was saved and at its end."""
    found = torch.load(Path(folder, "wanted.pt"))
    return [{"model": one["model"], "state": stepped(one["optim"]["state"])} for one in found]


def goes_on(name: str, folder: str) -> list[str]:
    """Load, save again, and train; return the differences from the run of ZeRO.

    The load is partial, since ZeRO has no state of frozen parameters.
    """
    model, optimizer = local(name, 1)
    load(model, optimizer, folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    found = [content(model, optimizer)]
    save(model, optimizer, str(Path(folder, BACK)))
    train(model, optimizer, range(laws.BEFORE, laws.BEFORE + laws.AFTER))
    found.append(content(model, optimizer))
    return difference(found, wanted_in(folder))


def goes_back(name: str, policy: str, folder: str) -> list[str]:
    """Load the state of the TorchOptimizer into ZeRO, and train; return the differences."""
    model, zero = laws.made(name, 1, policy)
    load(model, zero, str(Path(folder, BACK)))
    train(model, zero, range(laws.BEFORE, laws.BEFORE + laws.AFTER))
    found = laws.content(model, zero)
    if zero.rank:
        return []
    kept = {"model": found["model"], "state": stepped(found["optim"]["state"])}
    return difference(kept, wanted_in(folder)[-1])


def scheduled_values_saved(folder: str) -> None:
    """Save ZeRO with a schedule in a tuple, and one for its rate."""
    model = net(0)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), adamw(lr=_rate, betas=(_beta, 0.9)))
    train(model, zero, range(laws.BEFORE))
    save(model, zero, folder)
    train(model, zero, range(laws.BEFORE, laws.BEFORE + laws.AFTER))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), Path(folder, "wanted.pt"))


def scheduled_values_loaded(folder: str) -> list[str]:
    """Load into a TorchOptimizer with these schedules. A partial load keeps the tuple's own."""
    model = net(1)
    optimizer = TorchOptimizer(model.named_parameters(), adamw(lr=_rate, betas=(_beta, 0.9)))
    load(model, optimizer, folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert optimizer.param_groups[0]["betas"][0] is _beta
    train(model, optimizer, range(laws.BEFORE, laws.BEFORE + laws.AFTER))
    return difference(model.state_dict(), torch.load(Path(folder, "wanted.pt")))


def a_number_loads_no_schedule(folder: str) -> str:
    """Return the error of a strict load into an optimizer with a number instead of the schedule."""
    model = net(1)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = TorchOptimizer(trained, sgd(lr=0.1, momentum=0.9))
    return laws.raised(load, model, optimizer, folder)


def _rate(step: Any) -> Any:
    return 0.1 / (1 + step)


def _beta(step: Any) -> Any:
    return 0.5 + 0.4 / (1 + step)
