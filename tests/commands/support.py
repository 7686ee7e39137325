"""Helpers that run commands in this process, and make checkpoints for them."""

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from torch import nn

from functional_optim.command_line import cli

OWN = """
import torch
import functional_optim as fo

def coupled(lr=0.1):
    return fo.chain(fo.decoupled_weight_decay(0.5), fo.sgd(lr=lr, momentum=0.9))

def oracle(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.5)

def clipped():
    return fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr=0.1))

def eight_bit():
    return fo.stored(fo.adamw(lr=0.1), state="int8")

def with_master():
    return fo.stored(fo.adamw(lr=0.1), param="bfloat16+master")

def divided():
    where = fo.labels({"matrices": fo.with_shape(lambda shape: len(shape) == 2)}, default="rest")
    return fo.partition({"matrices": fo.muon(lr=0.02), "rest": fo.adamw(lr=0.1)}, where)

def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 5))

made = fo.adamw(lr=0.2)

def number():
    return 3

def broken():
    raise RuntimeError("no such luck")
"""
"""Source of a user's module, ``own``."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)])


def shown(*arguments: object) -> str:
    """Return the standard output of a command that succeeds."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def failed(code: int, *arguments: object) -> str:
    """Return the one-line message of a command that ends with this exit code."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))


def stepped(optimizer: Any, module: nn.Module, steps: int = 3) -> Any:
    """Make some steps with different gradients, and return the optimizer."""
    chance = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for param in module.parameters():
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=chance)
        optimizer.step()
    return optimizer


def shapes(folder: Path) -> Path:
    """Write a file with the shapes of :func:`model`, and return its path."""
    path = folder / "shapes.json"
    entries = [
        {"path": name, "shape": list(param.shape)} for name, param in model().named_parameters()
    ]
    path.write_text(json.dumps(entries))
    return path


def saved(path: Path, optimizer: torch.optim.Optimizer) -> Path:
    torch.save(optimizer.state_dict(), path)
    return path


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)
