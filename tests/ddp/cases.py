"""Table of comparisons of our hook with DDP and torch.optim, bit for bit."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim import adagrad, adamw, chain, clip_by_global_norm, lion, sgd
from tests.choices import case as tried

from .models import (
    Branches,
    Checkpointed,
    Complex,
    Convolutions,
    FixedBranches,
    Odd,
    Sparse,
    Tied,
    Tower,
    Transposed,
)
from .torch_side import Lion
from .twins import Case, MakeTorch, compare

SMALL: dict[str, Any] = {"bucket_cap_mb": 0.03}  # two layers of Tower
VIEW: dict[str, Any] = {**SMALL, "gradient_as_bucket_view": True}
UNUSED: dict[str, Any] = {**SMALL, "find_unused_parameters": True}
STATIC: dict[str, Any] = {**SMALL, "static_graph": True}
TINY: dict[str, Any] = {"bucket_cap_mb": 0.01}  # less than one layer
ONE: dict[str, Any] = {"bucket_cap_mb": 25}

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
MIXED = partial(Tower, [F32, F64, BF16, F32, F64, BF16, F32])
DOUBLE = partial(Tower, [F64] * 6)


def torch_twin(name: str, **options: Any) -> MakeTorch:
    """Return a maker of a class of torch.optim, in the implementation that equals ours."""
    made = getattr(torch.optim, name)
    return lambda params: made(params, foreach=False, **options)


def two_groups(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW with other options for biases, by torch's parameter groups."""
    biases = [param for param in params if param.dim() == 1]
    rest = [param for param in params if param.dim() > 1]
    return torch.optim.AdamW(
        [{"params": rest}, {"params": biases, "weight_decay": 0.0, "lr": 0.1}],
        lr=1e-2,
        weight_decay=0.1,
        foreach=False,
    )


def halving(step: float) -> float:
    """Return a learning rate that halves at each step."""
    return 0.1 * 0.5**step


ADAMW = Case(
    adamw(lr=1e-2, weight_decay=0.1), torch_twin("AdamW", lr=1e-2, weight_decay=0.1), ddp=SMALL
)
SGD = Case(
    sgd(lr=0.1, momentum=0.9, weight_decay=0.01),
    torch_twin("SGD", lr=0.1, momentum=0.9, weight_decay=0.01),
    ddp=SMALL,
)
ADAGRAD = Case(
    adagrad(lr=0.05, lr_decay=0.1), torch_twin("Adagrad", lr=0.05, lr_decay=0.1), ddp=SMALL
)
LION = Case(
    lion(lr=1e-3, weight_decay=0.1),
    lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
    ddp=SMALL,
)

CASES: dict[str, Case] = {
    # This case comes first, so that several threads meet a chain that is not compiled yet.
    "many buckets at once": ADAMW._replace(
        ddp={"bucket_cap_mb": 1e-4, "find_unused_parameters": True}
    ),
    "adamw": ADAMW,
    "sgd": SGD,
    "adagrad": ADAGRAD,
    "lion": LION,
    "schedule": SGD._replace(
        optimizer=sgd(lr=halving, momentum=0.9, weight_decay=0.01), schedule=halving
    ),
    "set_hyper": ADAMW._replace(
        hyper={1: {"lr": 0.05}, 2: {"weight_decay": 0.0, "betas": (0.5, 0.9)}, 3: {"lr": 1e-3}}
    ),
    "override": ADAMW._replace(
        optimizer=ADAMW.optimizer.override(
            lambda path: path[-1].endswith("bias"), weight_decay=0.0, lr=0.1
        ),
        twin=two_groups,
    ),
    "reference executor": LION._replace(executor="reference"),
    # -- DDP's options
    "bucket views": ADAMW._replace(ddp=VIEW),
    "static graph": SGD._replace(ddp=STATIC),
    "static graph, bucket views": ADAMW._replace(ddp={**STATIC, **VIEW}),
    "static graph, mixed dtypes": ADAMW._replace(model=MIXED, ddp=STATIC),
    "no_sync": ADAMW._replace(backwards=3),
    "no_sync, bucket views": SGD._replace(backwards=2, ddp=VIEW),
    # -- parameters that are not always used
    "unused": ADAMW._replace(model=Branches, ddp=UNUSED),
    "unused, momentum": SGD._replace(model=Branches, ddp=UNUSED),
    "unused, adagrad": ADAGRAD._replace(model=Branches, ddp=UNUSED),
    "unused, lion": LION._replace(model=Branches, ddp=UNUSED),
    "unused, bucket views": SGD._replace(model=Branches, ddp={**UNUSED, **VIEW}),
    "unused, no_sync": SGD._replace(model=Branches, ddp=UNUSED, backwards=2),
    "unused, one bucket": SGD._replace(model=Branches, ddp={**ONE, "find_unused_parameters": True}),
    "unused, static graph": SGD._replace(model=FixedBranches, ddp=STATIC),
    "unused, static graph, bucket views": ADAMW._replace(
        model=FixedBranches, ddp={**STATIC, **VIEW}
    ),
    "unused, static graph and find_unused": SGD._replace(
        model=FixedBranches, ddp={**STATIC, "find_unused_parameters": True}
    ),
    "all used, find_unused": ADAMW._replace(ddp=UNUSED),
    # -- models
    "mixed dtypes": ADAMW._replace(model=MIXED),
    "mixed dtypes, bucket views": SGD._replace(model=MIXED, ddp=VIEW),
    "frozen, 0-d, empty": ADAMW._replace(model=Odd),
    "tied": SGD._replace(model=Tied, ddp=TINY),
    "tied, static graph": ADAMW._replace(model=Tied, ddp={**STATIC, **TINY}),
    "channels_last": ADAMW._replace(model=Convolutions, ddp={"bucket_cap_mb": 0.002}),
    "channels_last, bucket views": SGD._replace(
        model=Convolutions, ddp={**VIEW, "bucket_cap_mb": 0.002}
    ),
    "transposed": SGD._replace(model=Transposed, ddp=TINY),
    "checkpointed": SGD._replace(model=Checkpointed, ddp=STATIC),
    "complex": ADAGRAD._replace(model=Complex, ddp=TINY),
    "complex, bucket views": ADAMW._replace(model=Complex, ddp={**VIEW, **TINY}),
    "sparse": Case(sgd(lr=0.1), torch_twin("SGD", lr=0.1), model=Sparse, ddp=SMALL),
    "sparse, bucket views": Case(sgd(lr=0.1), torch_twin("SGD", lr=0.1), model=Sparse, ddp=VIEW),
    # -- inner hooks
    "fp16": ADAMW._replace(inner="fp16"),
    "fp16, bucket views": ADAMW._replace(inner="fp16", ddp=VIEW),
    "bf16": SGD._replace(inner="bf16"),
    "power, one bucket": SGD._replace(inner="power", ddp=ONE),
    "power, in order": ADAMW._replace(inner="power", in_order=True),
    "fp16 power, one bucket": SGD._replace(inner="fp16 power", ddp=ONE),
    "fp16 power, in order": SGD._replace(inner="fp16 power", in_order=True),
    "list": ADAMW._replace(inner="list"),
    "copy": ADAMW._replace(inner="copy"),
    "copy, bucket views": SGD._replace(inner="copy", ddp=VIEW),
    "at once": ADAMW._replace(inner="at once"),
    "at once, unused": SGD._replace(inner="at once", model=Branches, ddp=UNUSED),
    "in order": ADAMW._replace(in_order=True),
    "in order, unused": SGD._replace(in_order=True, model=Branches, ddp=UNUSED),
}

SLOW = SGD._replace(inner="slow", in_order=True, iterations=3)
IN_ORDER: dict[str, Case] = {
    "slow": SLOW,
    "slow, unused": SLOW._replace(model=Branches, ddp=UNUSED),
    "power, one bucket, unused": SGD._replace(
        inner="power", in_order=True, ddp={**ONE, "find_unused_parameters": True}
    ),
    "power, unused": SGD._replace(inner="power", in_order=True, model=Branches, ddp=UNUSED),
}
"""Inner hooks that launch collectives from callbacks, with collectives of DDP before those.

Out of order, ranks use each other's data as their own, and gloo ends the process.
"""


def clipped(model: Any, inner: str = "allreduce", **ddp: Any) -> Case:
    """Return a case that clips by a norm below all norms that occur."""
    return SGD._replace(
        optimizer=chain(clip_by_global_norm(0.05), sgd(lr=0.1, momentum=0.9)),
        twin=torch_twin("SGD", lr=0.1, momentum=0.9),
        clip=0.05,
        model=model,
        ddp={**SMALL, **ddp},
        inner=inner,
    )


CLIPPED: dict[str, Case] = {
    "clip": clipped(DOUBLE),
    "clip, bucket views": clipped(DOUBLE, gradient_as_bucket_view=True),
    "clip, static graph": clipped(DOUBLE, static_graph=True),
    "clip, static graph, mixed dtypes": clipped(
        partial(Tower, [F32, F64, F32, F64]), static_graph=True
    ),
    "clip, float32": clipped(Tower),
    "clip, mixed dtypes": clipped(partial(Tower, [F32, F64, F32, F64])),
    "clip, unused": clipped(Branches, find_unused_parameters=True),
    "clip, unused, static graph": clipped(FixedBranches, static_graph=True),
    "clip, copy": clipped(DOUBLE, "copy"),
}
"""Chains that clip by global norm: torch computes the norm in another order and precision."""


def run_cases(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Run these comparisons on this rank, one after the other."""
    known = {**CASES, **CLIPPED, **IN_ORDER}
    found = {}
    for name in names:
        with tried(name=name):
            found[name] = compare(known[name])
    return found
