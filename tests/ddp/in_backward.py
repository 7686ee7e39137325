"""Jobs of the ranks: a DDP module that steps in backward beside a twin that steps after it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import TorchOptimizer, adamw
from hooks import apply_optimizer_in_backward
from hooks.in_backward import get_in_backward_optimizers, reduce_in_backward
from tests.choices import case
from tests.hooks_alone.support import assert_same

from .cases import SMALL, STATIC, UNUSED
from .comparison import digest
from .models import WIDTH, Branches, Convolutions, Tower
from .twins import backward

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], Make]] = {
    "torch": (
        AdamW,
        {"lr": 0.01, "foreach": False},
        lambda params: AdamW(params, lr=0.01, foreach=False),
    ),
    "ours": (adamw(lr=0.01), {}, lambda params: TorchOptimizer(list(params), adamw(lr=0.01))),
}
GRAPHS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "all used": (Convolutions, {"bucket_cap_mb": 0.002}),
    "unused": (Branches, UNUSED),
    "static": (Tower, STATIC),
}


def twin_of(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return a copy under DDP, which divides as our hook does."""
    twin = DistributedDataParallel(copy.deepcopy(module), **options)
    twin.register_comm_hook(dist.group.WORLD, allreduce_hook)
    return twin


def compare_all(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Run comparisons; return for each the digests of the parameters after each iteration."""
    found = []
    for one in cases:
        with case(**one):
            found.append(compare(**one))
    return found


def compare(
    optimizer: str, when: str, views: bool, graph: str, parts: int, own_hook: bool
) -> list[str]:
    """Compare both sides; return digests of the parameters after each iteration.

    Args:
        optimizer: a key of OPTIMIZERS.
        when: "before" wrapping, "after" wrapping, or after some iterations ("late").
        views: True if gradients are views of DDP's buckets.
        graph: a key of GRAPHS.
        parts: backward passes per iteration; all but the last are under ``no_sync``.
        own_hook: True if parameters have their own hooks.
    """
    torch.manual_seed(0)
    optimizer_class, kwargs, make = OPTIMIZERS[optimizer]
    model, options = GRAPHS[graph]
    module = model()
    options = {**options, "gradient_as_bucket_view": views}
    twin = twin_of(module, **options)

    def apply() -> None:
        named = False if when == "before" else ours
        apply_optimizer_in_backward(
            optimizer_class, module.parameters(), kwargs, own_hook, ddp=named
        )

    if when == "before":
        apply()
    ours = DistributedDataParallel(module, **options)
    if when == "before":
        reduce_in_backward(ours)
    if when == "after":
        apply()
    afterwards = [make(one.parameters()) for one in (twin, ours)]
    digests = []
    for iteration in range(4):
        if when == "late" and iteration == 2:
            apply()
            afterwards = [make(twin.parameters())]  # its state starts from nothing, as ours does
        in_backward = when != "late" or iteration >= 2
        before = digest(module.parameters())
        for one in (ours, twin):
            backward(one, iteration, parts)
        for one in afterwards[:1] if in_backward else afterwards:
            one.step()
            one.zero_grad()
        assert_same(module, twin)
        assert all(param.grad is None for param in ours.parameters())
        kept = get_in_backward_optimizers(module)
        assert len(kept) == (len(list(module.parameters())) if in_backward else 0)
        digests.append(digest(module.parameters()))
        assert digests[-1] != before
    return digests


def ignored() -> dict[str, str]:
    """Step parameters that DDP ignores by this rank's gradient, the rest by the mean.

    Returns:
        Digests of the ignored parameters, and of the rest.
    """
    torch.manual_seed(0)
    module = Tower()
    names = ["layers.1.weight", "layers.3.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    twin = twin_of(module, **SMALL)
    plain = SGD(twin.parameters(), lr=0.1)
    ours = DistributedDataParallel(module, **SMALL)
    apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1}, ddp=ours)
    for iteration in range(3):
        backward(ours, iteration)
        backward(twin, iteration)
        plain.step()
        plain.zero_grad()
        assert_same(module, twin)
        assert all(param.grad is None for param in ours.parameters())
    rest = [param for name, param in module.named_parameters() if name not in names]
    return {"ignored": digest([module.get_parameter(names[0])]), "rest": digest(rest)}


def stacked() -> None:
    """Apply two optimizers to each parameter, the second one later; one gradient is sparse."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, WIDTH, sparse=True), nn.Linear(WIDTH, 3))
    twin = twin_of(module)
    first, second = SGD(twin.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.02)
    apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1}, ddp=False)
    ours = DistributedDataParallel(module)
    reduce_in_backward(ours)
    for iteration in range(4):
        x = torch.tensor([iteration, dist.get_rank() + 3])
        if iteration == 2:
            apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.02})
        for one in (ours, twin):
            one(x).square().mean().backward()
        first.step()
        if iteration >= 2:
            second.step()
        twin.zero_grad()
        assert_same(module, twin)
        assert all(param.grad is None for param in ours.parameters())
