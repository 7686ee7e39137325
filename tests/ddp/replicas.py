"""Data-parallel training where not every rank has a compiler, or what others have compiled."""

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import functional_optim.testing.compiled_executor  # noqa: F401  adds the executor "compiled"
from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_global_norm, qhm, sgd
from functional_optim.kernels.exact import kernel
from functional_optim.native import cache
from hooks import step_hook

from .comparison import digest

ITERATIONS = 5
WIDTH = 80
"""So that a layer has more elements than a step is compiled for."""

OPTIMIZERS: dict[str, Optimizer] = {
    "qhm": qhm(0.1, weight_decay=0.1),
    "adamw": adamw(0.01),
    "clipped": chain(clip_by_global_norm(0.01), sgd(0.1, momentum=0.9)),
}


def train_all(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train, one case after the other, each rank on data of its own."""
    return [train(**one) for one in cases]


def train(front_end: str, optimizer: str, executor: str, compilers: list[str]) -> dict[str, Any]:
    """Train.

    Args:
        front_end: "hook" (the step is made in DDP's communication hook) or "class" (by a
            TorchOptimizer on each rank, after backward).
        optimizer: a key of OPTIMIZERS.
        executor: its name.
        compilers: for each rank "there" (all may be compiled already), "anew" (nothing is) or
            "none".

    Returns:
        A digest of the parameters of this rank, how many loops it has, and what it was warned of.
    """
    with _compiler(compilers[dist.get_rank()]), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.03)
        _train(ddp, front_end, OPTIMIZERS[optimizer], executor)
        loops = sum(not isinstance(one, str) for one in kernel._PROGRAMS.values())
    return {
        "digest": digest(ddp.parameters()),
        "loops": loops,
        "warned": [str(one.message) for one in seen if one.category is RuntimeWarning],
    }


@contextmanager
def _compiler(which: str) -> Iterator[None]:
    """As in a process that has compiled nothing, with this compiler."""
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ):
        if which != "there":
            os.environ["FUNCTIONAL_OPTIM_CACHE"] = empty
        if which == "none":
            os.environ["CXX"] = "/nonexistent"
        known = kernel._PROGRAMS, kernel._WARNED, cache._WARNED, cache._LOADED
        for one in known:
            one.clear()
        yield
        for one in known:
            one.clear()


def _train(ddp: DistributedDataParallel, front_end: str, chosen: Optimizer, executor: Any) -> None:
    step: Any = None
    if front_end == "hook":
        step_hook(ddp, chosen, executor=executor)
    else:
        step = TorchOptimizer(ddp.parameters(), chosen.using(executor=executor)).step
    data = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(ITERATIONS):
        x = torch.randn(8, WIDTH, generator=data)
        ddp(x).square().mean().backward()
        if step is not None:
            step()
        ddp.zero_grad()
