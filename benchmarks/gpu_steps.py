"""Steps on a CUDA device, compared with torch's steps and with the memory bandwidth."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.ratios import Spread, spread
from benchmarks.timing import Step, take_turns
from benchmarks.workloads import GPT2, WORKLOADS
from functional_optim import (
    BoundOptimizer,
    TorchOptimizer,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    lamb,
    muon,
    qhm,
)
from functional_optim.algorithms import sgd

Params = list[Parameter]


class Steps(Protocol):
    """Object with a step."""

    def step(self) -> object:
        """Step its parameters."""
        ...


Make = Callable[[Params], Steps]


class Clipped(NamedTuple):
    """Optimizer of torch that clips the gradients with torch before each step."""

    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Clip the gradients, and step."""
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()


class InBuffers(NamedTuple):
    """Bound optimizer whose gradients are already in its flat buffers."""

    optimizer: BoundOptimizer
    gradients: list[Tensor]

    def step(self) -> None:
        """Step with these gradients."""
        self.optimizer.step(self.gradients)


class Race(NamedTuple):
    """Optimizers that step the same shapes. Ratios are taken to the first one."""

    name: str
    shapes: list[tuple[int, ...]]
    by: Mapping[str, Make]
    passes: int
    """Number of times that a step has to read or write each element."""


class Result(NamedTuple):
    """A contestant's time, in milliseconds, and as a multiple of the first one's."""

    race: str
    contestant: str
    milliseconds: float
    ratio: Spread
    of_copy: float
    """Multiple of the time that the memory needs to read and write as often."""


def _gpt2() -> list[tuple[int, ...]]:
    return list(WORKLOADS[GPT2].shapes["full"]())


def _matrices() -> list[tuple[int, ...]]:
    square: tuple[int, ...] = (768, 768)
    return [square] * 24 + [(3072, 768)] * 6 + [(768, 3072)] * 6


def _in_buffers(params: Params) -> InBuffers:
    """Bind AdamW, and move the gradients of the parameters into the flat buffers."""
    bound = adamw(lr=1e-3).bind(params)
    bound.ready()
    gradients = bound.gradients
    for place, param in zip(gradients, params, strict=True):
        place.copy_(param.grad)
        param.grad = None
    return InBuffers(bound, gradients)


RACES = (
    Race(
        "AdamW, GPT-2 small",
        _gpt2(),
        {
            "torch fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
            "torch foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
            "TorchOptimizer": lambda p: TorchOptimizer(p, adamw(lr=1e-3)),
            "TorchOptimizer, executor fused": lambda p: TorchOptimizer(
                p, adamw(lr=1e-3).using(executor="fused")
            ),
            "bind, gradients in flat buffers": _in_buffers,
        },
        passes=7,
    ),
    Race(
        "AdamW, gradients clipped to a norm, GPT-2 small",
        _gpt2(),
        {
            "torch foreach": lambda p: Clipped(torch.optim.AdamW(p, lr=1e-3, foreach=True)),
            "TorchOptimizer": lambda p: TorchOptimizer(
                p, chain(clip_by_global_norm(1.0), adamw(lr=1e-3))
            ),
            "TorchOptimizer, apply_if_finite first": lambda p: TorchOptimizer(
                p, chain(apply_if_finite(3), clip_by_global_norm(1.0), adamw(lr=1e-3))
            ),
        },
        passes=10,
    ),
    Race(
        "LAMB, GPT-2 small",
        _gpt2(),
        {
            "TorchOptimizer, executor reference": lambda p: TorchOptimizer(
                p, lamb(lr=1e-3).using(executor="reference")
            ),
            "TorchOptimizer": lambda p: TorchOptimizer(p, lamb(lr=1e-3)),
        },
        passes=9,
    ),
    Race(
        "SGD with momentum, GPT-2 small",
        _gpt2(),
        {
            "torch fused": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
            "torch foreach": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
            "TorchOptimizer": lambda p: TorchOptimizer(p, sgd(lr=1e-3, momentum=0.9)),
            "QHM, TorchOptimizer": lambda p: TorchOptimizer(p, qhm(lr=1e-3)),
        },
        passes=5,
    ),
    Race(
        "AdamW, 1,000 tensors of 1,000",
        [(1000,)] * 1000,
        {
            "torch fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
            "torch foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
            "TorchOptimizer": lambda p: TorchOptimizer(p, adamw(lr=1e-3)),
            "bind, gradients in flat buffers": _in_buffers,
        },
        passes=7,
    ),
    Race(
        "Muon, 36 matrices of six layers",
        _matrices(),
        {
            "torch.optim.Muon": lambda p: torch.optim.Muon(p, lr=1e-3),
            "TorchOptimizer": lambda p: TorchOptimizer(p, muon(lr=1e-3)),
        },
        passes=5,
    ),
)


def params_of(shapes: list[tuple[int, ...]]) -> Params:
    """Return parameters with gradients, the same in every call."""
    draws = torch.Generator("cuda").manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=draws, device="cuda")

    made = [Parameter(normal(shape)) for shape in shapes]
    for one in made:
        one.grad = normal(tuple(one.shape))
    return made


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a large copy on the device."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    found = take_turns(
        {"copy": lambda: target.copy_(source)},
        rounds=5,
        turn_seconds=0.05,
        wait=torch.cuda.synchronize,
        tell=_nothing,
    )
    return 2 * source.numel() * source.element_size() / min(found["copy"])


def run(races: tuple[Race, ...] = RACES, rounds: int = 7) -> tuple[float, list[Result]]:
    """Run every race. Return the bandwidth of a copy, and the results."""
    bandwidth, results = copy_bandwidth(), []
    for race in races:
        steps: dict[str, Step] = {}
        for name, make in race.by.items():
            optimizer: Any = make(params_of(race.shapes))
            for _ in range(3):
                optimizer.step()
            steps[name] = optimizer.step
        torch.cuda.synchronize()
        seconds = take_turns(
            steps, rounds=rounds, turn_seconds=0.05, wait=torch.cuda.synchronize, tell=_nothing
        )
        elements = sum(torch.Size(shape).numel() for shape in race.shapes)
        least = elements * 4 * race.passes / bandwidth
        first = next(iter(steps))
        results += [
            Result(
                race.name,
                name,
                1e3 * sorted(found)[len(found) // 2],
                spread(found, seconds[first]),
                sorted(found)[len(found) // 2] / least,
            )
            for name, found in seconds.items()
        ]
        del steps, seconds
        torch.cuda.empty_cache()
    return bandwidth, results


def _nothing(_: int) -> None:
    """Ignore the progress."""
