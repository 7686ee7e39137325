"""Test of stages whose sums must be those of whole tensors, over uneven shards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from functional_optim import Optimizer, TorchOptimizer, add_noise, chain, dog, prodigy
from tests.choices import case
from tests.tensors import normal

from .jobs import mesh

SHAPES = {"matrix": (5, 7), "row": (1, 3), "bias": (4,), "one": (1,)}
STEPS = 4

RULES: dict[str, Callable[[], Optimizer]] = {
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
    "prodigy, sliced": lambda: prodigy(1.0, d0=1e-2, slice_p=2),
    "noise, dog": lambda: chain(add_noise(), dog(reps_rel=0.1)),
}
"""Rules with sums. Noise needs whole tensors, so the sums after it are of DTensors."""


def params_of(*, cut: bool) -> dict[str, Tensor]:
    made = {name: normal(*shape, seed=k) for k, (name, shape) in enumerate(SHAPES.items())}
    return {name: nn.Parameter(_cut(one) if cut else one) for name, one in made.items()}


def _cut(tensor: Tensor) -> Tensor:
    return distribute_tensor(tensor, mesh(), [Shard(0)])


def grad_at(step: int, place: int, like: Tensor) -> Tensor:
    grad = normal(*like.shape, seed=100 * (step + 1) + place)
    return _cut(grad) if isinstance(like, DTensor) else grad


def stepped(optimizer: Optimizer, *, cut: bool, pure: bool) -> list[Tensor]:
    """Return the whole parameters after some steps."""
    params = params_of(cut=cut)
    front_end, state = TorchOptimizer(params.items(), optimizer), optimizer.init(params)
    now: Any = params
    for step in range(STEPS):
        grads = {name: grad_at(step, k, one) for k, (name, one) in enumerate(params.items())}
        if pure:
            with torch.no_grad():
                now, state = optimizer.update(now, grads, state)
        else:
            for name, grad in grads.items():
                params[name].grad = grad
            front_end.step()
    for name, one in now.items():
        assert not cut or one.placements == params[name].placements
    return [one.full_tensor() if cut else one.detach() for one in now.values()]


def sums() -> None:
    """Check that sums have the bits of one process."""
    for name, make in RULES.items():
        for pure in (False, True):
            with case(name=name, pure=pure):
                optimizer = make()
                found = stepped(optimizer, cut=True, pure=pure)
                wanted = stepped(optimizer, cut=False, pure=pure)
                for one, other in zip(found, wanted, strict=True):
                    assert torch.equal(one, other)
