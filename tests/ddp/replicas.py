"""Data-parallel training in which ranks differ in their compilers and compiled code."""

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
"""Width with which a layer has enough elements for a compiled step."""

OPTIMIZERS: dict[str, Optimizer] = {
    "qhm": qhm(0.1, weight_decay=0.1),
    "adamw": adamw(0.01),
    "clipped": chain(clip_by_global_norm(0.01), sgd(0.1, momentum=0.9)),
}


def train_all(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train one case after the other, each rank on its own data."""
    return [train(**one) for one in cases]


def train(front_end: str, optimizer: str, executor: str, compilers: list[str]) -> dict[str, Any]:
    """Train one case on this rank.

    Args:
        front_end: "hook" (DDP's communication hook makes the step) or "class" (a TorchOptimizer
            on each rank makes the step after backward).
        optimizer: a key of OPTIMIZERS.
        executor: its name.
        compilers: for each rank, "there" (compiled code can exist already), "anew" (no compiled
            code exists), or "none" (no compiler exists).

    Returns:
        A digest of this rank's parameters, the number of its loops, and its warnings.
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
    """Make this process look as if it had compiled nothing, with this compiler."""
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
