"""Tests of totals over DTensors: they include all ranks, and one collective reduces them."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

import functional_optim
from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    TorchOptimizer,
    Transform,
    accumulate,
    adamw,
    adaptive_grad_clip,
    add_noise,
    apply_if_finite,
    cautious,
    centralize,
    chain,
    clip_by_block_rms,
    clip_by_global_norm,
    constrain_norm,
    dadapt_adam,
    dadapt_sgd,
    dog,
    lamb,
    lars,
    mars,
    masked,
    novograd,
    prodigy,
    sam,
    scale_by_trust_ratio,
    schedule_free_sgd,
    sgd,
    weight_decay,
    with_shape,
)
from functional_optim.core.leaf import needs_total
from functional_optim.core.local_shards import check_placements
from functional_optim.core.stage import Stage
from tests.choices import EVERYTHING, case
from tests.dtensors import gather
from tests.tensors import normal

from .jobs import MODELS, WAYS, Way, plain, set_gradients

STEPS = 4
LR = 0.1


class ScaleHyper(NamedTuple):
    limit: float


def sum_of_sizes(grad: Tensor) -> Tensor:
    return grad.abs().sum(dtype=torch.float64)


def limited(
    grad: Tensor, param: Tensor, state: NoState, c: ScaleHyper, total: Tensor
) -> tuple[Tensor, NoState]:
    return grad * (c.limit / (total + 1.0)).to(grad.dtype), state


LIMIT = Transform(name="limit", hyper=ScaleHyper, transform=limited, measure=sum_of_sizes)


class LargestShared(NamedTuple):
    largest: float


class LargestCoefficients(NamedTuple):
    size: float


def largest_init(hyper: ScaleHyper) -> LargestShared:
    return LargestShared(0.0)


def largest_reduce(
    param: Tensor, grad: Tensor, state: NoState, c: LargestCoefficients
) -> tuple[Tensor]:
    # This norm has no value on an empty shard, whose maximum does not exist.
    return ((grad.abs() / grad.abs().max().clamp(min=1e-300) * 0.0 + grad.abs()).sum(),)


def largest_combine(
    shared: LargestShared, totals: tuple[float], hyper: ScaleHyper
) -> LargestShared:
    return LargestShared(max(shared.largest, totals[0]))


def largest_coefficients(
    step: float, hyper: ScaleHyper, shared: LargestShared
) -> LargestCoefficients:
    return LargestCoefficients(-hyper.limit / (shared.largest + 1.0))


def largest_rule(
    param: Tensor, grad: Tensor, state: NoState, c: LargestCoefficients
) -> tuple[Tensor, NoState]:
    return param + grad * c.size, state


LARGEST = Rule(
    name="largest",
    hyper=ScaleHyper,
    rule=largest_rule,
    shared=LargestShared,
    init_shared=largest_init,
    coefficients=largest_coefficients,
    reduce=largest_reduce,
    totals=1,
    combine=largest_combine,
)


def is_bias(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1


class Reduced(NamedTuple):
    """Chain with a reduction."""

    make: Callable[[], Optimizer]
    collectives: int | None
    """All-reduces of one step for all parameters, or None if each parameter needs its own."""


CASES: dict[str, Reduced] = {
    "clip": Reduced(lambda: chain(clip_by_global_norm(0.01), sgd(lr=LR)), 1),
    "decay, clip": Reduced(
        lambda: chain(weight_decay(0.1), clip_by_global_norm(0.01), adamw(lr=LR)), 1
    ),
    "two clips": Reduced(
        lambda: chain(clip_by_global_norm(0.1), clip_by_global_norm(0.01), adamw(lr=LR)), 2
    ),
    "clip, two groups": Reduced(
        lambda: chain(clip_by_global_norm(0.01), sgd(lr=LR)).override(with_shape(is_bias), lr=0.01),
        1,
    ),
    "finite": Reduced(lambda: chain(apply_if_finite(3), adamw(lr=LR)), 1),
    "finite, clip": Reduced(
        lambda: chain(apply_if_finite(3), clip_by_global_norm(0.01), adamw(lr=LR)), 2
    ),
    "finite, two groups": Reduced(
        lambda: chain(apply_if_finite(3), adamw(lr=LR)).override(with_shape(is_bias), lr=0.01), 1
    ),
    "accumulate, clip": Reduced(
        lambda: chain(accumulate(2), clip_by_global_norm(0.01), adamw(lr=LR)), 1
    ),
    "prodigy": Reduced(lambda: prodigy(1.0, d0=1e-2), 1),
    "prodigy, sliced": Reduced(lambda: prodigy(1.0, d0=1e-2, slice_p=2), None),
    "dadapt_adam": Reduced(lambda: dadapt_adam(d0=1e-2), 1),
    "dadapt_sgd": Reduced(lambda: dadapt_sgd(d0=1e-2, momentum=0.5), 1),
    "dog": Reduced(lambda: dog(reps_rel=0.1), 1),
    "novograd": Reduced(lambda: novograd(lr=LR), None),
    "sam": Reduced(lambda: chain(sam(0.05), adamw(lr=LR)), 1),
    "schedule-free": Reduced(lambda: schedule_free_sgd(lr=LR), 0),
    "lamb": Reduced(lambda: lamb(lr=LR), None),
    "lars": Reduced(lambda: lars(lr=LR), None),
    "cautious": Reduced(lambda: chain(cautious(), sgd(lr=LR)), None),
    "trust ratio, clip": Reduced(
        lambda: chain(scale_by_trust_ratio(), clip_by_global_norm(0.01), sgd(lr=LR)), None
    ),
    "trust ratio, prodigy": Reduced(
        lambda: chain(scale_by_trust_ratio(), prodigy(1.0, d0=1e-2)), None
    ),
    "units, norm of rows": Reduced(
        lambda: chain(
            centralize(),
            adaptive_grad_clip(0.1),
            clip_by_block_rms(0.01),
            sgd(lr=LR),
            constrain_norm(rows=True),
        ),
        None,
    ),
    "mars, noise, norm": Reduced(
        lambda: chain(mars(), add_noise(), adamw(lr=LR), constrain_norm()), None
    ),
    "a user's measure": Reduced(lambda: chain(LIMIT(limit=0.5), sgd(lr=LR)), 1),
    "a user's reduce": Reduced(lambda: chain(LARGEST(limit=0.5)), 1),
    "decay of biases, clip": Reduced(
        lambda: chain(
            masked(weight_decay(0.1), with_shape(is_bias)), clip_by_global_norm(0.01), sgd(lr=LR)
        ),
        1,
    ),
}
"""Chains that together use every stage of the package that needs a total."""


def reducing_stages() -> Iterator[Stage]:
    """Yield the stages of the package that need a total."""
    for part in ("algorithms", "transforms", "wrappers"):
        package = importlib.import_module(f"{functional_optim.__name__}.{part}")
        for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(one.name)).values()
            yield from (k for k in values if isinstance(k, Stage) and needs_total(k))


def ways_of(name: str) -> dict[str, str]:
    """Return the ways of stepping to test for a chain, each with an executor."""
    optimizer = CASES[name].make()
    simple = not (optimizer.is_composed or optimizer.overrides or _is_whole(optimizer))
    ways = {"TorchOptimizer": "reference", "update_": "blocked", "update": "reference"}
    return {**ways, "bound": "auto"} if simple else ways


def _is_whole(optimizer: Optimizer) -> bool:
    return any(stage.kind != "pointwise" for stage in optimizer.stages)


SHARES = ("fsdp", "three ranks", "by hand", "fsdp", "four ranks", "by hand")


def share(of: str) -> list[tuple[str, str]]:
    """Return one share of all pairs of a chain and a way, or all pairs if everything is tried.

    Shares are dealt in turn, and each chain begins one share later than the chain before it. So
    each chain is tried on two ranks with both models, and on three or four ranks. Each way is in
    each share.
    """
    return [
        (name, way)
        for first, name in enumerate(CASES)
        for place, way in enumerate(ways_of(name), first)
        if EVERYTHING or SHARES[place % len(SHARES)] == of
    ]


def as_one_process(model: str, tried: Sequence[tuple[str, str]]) -> None:
    """Fault 9: all ranks make the same decisions as one process with the same gradients.

    In the second step, one shard of a gradient holds NaN if the chain checks for it.
    """
    for name, way in tried:
        optimizer, executor = CASES[name].make(), ways_of(name)[way]
        own = optimizer if _is_whole(optimizer) else optimizer.using(executor=executor)
        with case(name=name, way=way):
            _as_one_process(model, own, WAYS[way], is_broken="finite" in name)


def _as_one_process(model: str, optimizer: Optimizer, way: Way, *, is_broken: bool) -> None:
    ours, twin = MODELS[model](torch.float64), plain(torch.float64)
    with torch.no_grad():
        steps = way(optimizer, ours), way(optimizer, twin)
    for number in range(STEPS):
        set_gradients(ours, number, model, missing=number == 2)
        grad = ours[0].weight.grad
        if is_broken and number == 1 and dist.get_rank() == 1:
            grad.to_local()[..., -1:] = float("nan")
        grads = gather([param.grad for param in ours.parameters()])
        for part, full in zip(twin.parameters(), grads, strict=True):
            part.grad = full
        for step, own in zip(steps, (ours, twin), strict=True):
            step(own)
        assert all(isinstance(param, DTensor) for param in ours.parameters())
        for param, part in zip(gather(ours.parameters()), twin.parameters(), strict=True):
            change = (param - part).abs().max().item()
            assert change < 1e-9, (number, change)


def collectives() -> None:
    """Fault 9: one collective reduces a total, instead of one for each parameter."""
    for name, one in CASES.items():
        if one.collectives is None:
            continue
        for kind in ("TorchOptimizer", "update_"):
            with case(name=name, way=kind):
                model = MODELS["fsdp"](torch.float64)
                with torch.no_grad():
                    step = WAYS[kind](one.make(), model)
                for number in range(2):  # accumulate steps at the second, sam reduces at the first
                    set_gradients(model, number, "fsdp", missing=False)
                    with CommDebugMode() as seen:
                        step(model)
                    made = sum(seen.get_comm_counts().values())
                    assert made <= one.collectives
                    if number == int("accumulate" in name):
                        assert made == one.collectives


def on_meshes() -> None:
    """Check that totals count replicated DTensors and plain tensors once."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    kinds = {
        "hybrid": [Replicate(), Shard(0)],
        "more of them": [Replicate(), Shard(0)],
        "both": [Shard(0), Shard(1)],
        "whole": [Replicate(), Replicate()],
    }
    for name in ("clip", "finite", "prodigy"):
        with case(name=name):
            twin = {key: nn.Parameter(normal(5, 3, seed=k)) for k, key in enumerate([*kinds, "p"])}
            ours = {
                key: nn.Parameter(distribute_tensor(twin[key].detach().clone(), mesh, placed))
                for key, placed in kinds.items()
            }
            ours["p"] = nn.Parameter(twin["p"].detach().clone())
            optimizer = CASES[name].make()
            with torch.no_grad():
                states = optimizer.init(ours), optimizer.init(twin)
            for step in range(STEPS):
                grads = {key: normal(5, 3, seed=100 + 10 * step + k) for k, key in enumerate(twin)}
                cut = {k: distribute_tensor(grads[k], mesh, placed) for k, placed in kinds.items()}
                optimizer.update_(ours, {**cut, "p": grads["p"]}, states[0])
                optimizer.update_(twin, grads, states[1])
            for key, param in ours.items():
                full = param.full_tensor() if isinstance(param, DTensor) else param
                assert torch.allclose(full, twin[key], rtol=0.0, atol=1e-5)


def tensor_parallel() -> None:
    """Check that totals count each element once if FSDP2 shards tensor-parallel parameters."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    layer, twin = nn.Linear(3, 8, bias=False), nn.Linear(3, 8, bias=False)
    twin.weight = nn.Parameter(normal(8, 3, seed=1))
    layer.weight = nn.Parameter(distribute_tensor(twin.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["dp"])
    assert not layer.weight.placements[0].is_shard()  # a _StridedShard
    for name in ("clip", "finite, clip"):
        with case(name=name):
            for model in (layer, twin):
                model.weight.grad = 2.0 * model.weight.detach()
                TorchOptimizer(model.parameters(), CASES[name].make()).step()
            full = layer.weight.full_tensor()
            assert torch.allclose(full, twin.weight, rtol=0.0, atol=1e-5)


class Ragged(Placement):
    """Placement that the package does not know."""


def unknown_placements() -> None:
    """Fault 9: a DTensor with an unknown placement is refused by name."""
    param = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])

    class Odd:
        placements = (Ragged(),)
        device_mesh = param.device_mesh

    with pytest.raises(ValueError, match=r"parameter at 'w' is a DTensor .*redistribute\(\) it"):
        check_placements(Odd(), "parameter at 'w'")
