"""What the ranks do: data-parallel training, where not every rank has a compiler."""

import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_global_norm, qhm, sgd
from functional_optim.executors.exact import kernel
from functional_optim.native import cache
from hooks import OptimizerState, step_hook

ITERATIONS = 30
WIDTH = 150
SLOW_SECONDS = 1.0

OPTIMIZERS: dict[str, Optimizer] = {
    "qhm": qhm(0.1, weight_decay=0.1),
    "adamw": adamw(0.01),
    "clipped": chain(clip_by_global_norm(0.01), sgd(0.1, momentum=0.9)),
}


def train(front_end: str, optimizer: str, executor: str, compilers: list[str]) -> dict[str, Any]:
    """Train, each rank on data of its own.

    Args:
        front_end: "hook" (the step is made in DDP's communication hook) or "class" (by a
            TorchOptimizer on each rank, after backward).
        optimizer: a key of OPTIMIZERS.
        executor: its name.
        compilers: for each rank "there", "none" or "slow".

    Returns:
        A digest of the parameters of this rank, how many loops it has, and what it was warned of.
    """
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _forget(Path(name), compilers[rank])
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)  # type: ignore[no-untyped-call]
        _train(ddp, front_end, OPTIMIZERS[optimizer], executor, rank)
        bytes_of = [param.detach().numpy().tobytes() for param in ddp.parameters()]
    found = [one for one in kernel._PROGRAMS.values() if not isinstance(one, str)]
    return {
        "digest": hashlib.sha256(b"".join(bytes_of)).hexdigest(),
        "loops": len(found),
        "warned": [str(one.message) for one in seen if one.category is RuntimeWarning],
    }


def _forget(folder: Path, compiler: str) -> None:
    """As in a process that has compiled nothing, with an empty folder and this compiler."""
    os.environ["FUNCTIONAL_OPTIM_CACHE"] = str(folder / "cache")
    os.environ["CXX"] = {
        "there": "g++",
        "none": "/nonexistent",
        "slow": str(_slow(folder)),
    }[compiler]
    kernel._PROGRAMS.clear()
    kernel._WARNED.clear()
    cache._LACKING.clear()
    cache._LOADED.clear()


def _slow(folder: Path) -> Path:
    """A compiler that takes its time."""
    script = folder / "slow-g++"
    script.write_text(f'#!/bin/sh\nsleep {SLOW_SECONDS}\nexec {shutil.which("g++")} "$@"\n')
    script.chmod(0o755)
    return script


def _train(
    ddp: DistributedDataParallel, front_end: str, chosen: Optimizer, executor: Any, rank: int
) -> None:
    step: Any = None
    if front_end == "hook":
        ddp.register_comm_hook(None, step_hook(OptimizerState(chosen, ddp, executor=executor)))
    else:
        step = TorchOptimizer(ddp.parameters(), chosen.using(executor=executor)).step
    data = torch.Generator().manual_seed(rank + 1)
    for _ in range(ITERATIONS):
        x = torch.randn(8, WIDTH, generator=data)
        ddp(x).square().mean().backward()
        if step is not None:
            step()
        ddp.zero_grad()
