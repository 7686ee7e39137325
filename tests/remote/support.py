"""Support of these tests: a small named model, its gradients, and a local run."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer

SHAPES = {"embed.weight": (5, 3), "hidden.weight": (4, 4), "hidden.bias": (4,), "scale": ()}
LIMIT = 240.0
"""Seconds to wait for other threads and processes; a test's own limit is longer."""
Gradients = Mapping[str, Tensor | None]


class WithoutEquivalent(torch.optim.SGD):
    """Optimizer class without functional equivalent."""


def run(calls: Sequence[Callable[[], None]]) -> None:
    """Run each call in its own thread; raise the first error."""
    errors: list[BaseException] = []

    def caught(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(one,)) for one in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters() -> dict[str, Tensor]:
    return {
        name: noise(seed, *shape).requires_grad_()
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


def gradients(step: int, without: Sequence[str] = ()) -> dict[str, Tensor | None]:
    return {
        name: None if name in without else noise(1000 * (step + 1) + place, *shape)
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def placement(workers: int, shift: int = 0) -> dict[str, str]:
    """Assign the parameters to the workers in turn."""
    return {name: f"ps{(place + shift) % workers}" for place, name in enumerate(SHAPES)}


def locally(optimizer: Optimizer, steps: Sequence[Gradients], **changes: Any) -> dict[str, Tensor]:
    """Return the parameters after these steps in one process."""
    params = list(parameters().values())
    with torch.no_grad():
        state = optimizer.init(params)
    for given in steps:
        optimizer.update_(params, list(given.values()), state, **changes)
    return dict(zip(SHAPES, params, strict=True))


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Assert that tensors are equal bit for bit, without NaN."""
    assert list(got) == list(want)
    for name, one in got.items():
        assert torch.equal(one.detach(), want[name].detach()), f"{name}: {one} is not {want[name]}"
