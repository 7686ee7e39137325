"""Hyper-parameters that are tensors: each optimizer and each group has its own copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    matching,
    partition,
    sgd,
    weight_decay,
)
from functional_optim.composition import chain
from functional_optim.frontends.local_optimizer import local_optimizer
from sharding import ZeroRedundancyOptimizer

from ..choices import case


def number(value: float = 0.5) -> Tensor:
    return torch.tensor(value)


def params() -> dict[str, Tensor]:
    return {name: torch.ones(2, requires_grad=True) for name in ("a", "b")}


def groups(lr: Any) -> list[dict[str, Any]]:
    return [{"params": [one], "lr": lr} for one in params().items()]


def parts(lr: Tensor) -> Optimizer:
    return partition({"a": sgd(lr), "b": sgd(lr)}, lambda path, shape: path[0])


MADE: dict[str, Callable[[Tensor], list[dict[str, Any]]]] = {
    "options of groups": lambda lr: TorchOptimizer(groups(lr), sgd(0.1)).param_groups,
    "defaults": lambda lr: (
        TorchOptimizer([{"params": [one]} for one in params().values()], sgd(lr)).param_groups
    ),
    "parts": lambda lr: TorchOptimizer(params().items(), parts(lr)).param_groups,
    "two optimizers": lambda lr: [
        TorchOptimizer(params().values(), sgd(lr)).param_groups[0] for _ in range(2)
    ],
    "an optimizer twice": lambda lr: [
        TorchOptimizer(params().values(), made).param_groups[0]
        for made in [sgd(lr)]
        for _ in range(2)
    ],
    "local": lambda lr: local_optimizer(sgd, groups(lr)).param_groups,
    "local, of a class": lambda lr: local_optimizer(torch.optim.SGD, groups(lr)).param_groups,
    "local parts": lambda lr: local_optimizer(parts(lr), list(params().items())).param_groups,
    "shards": lambda lr: ZeroRedundancyOptimizer(groups(lr), sgd(0.1)).param_groups,
    "shards of parts": lambda lr: (
        ZeroRedundancyOptimizer(list(params().items()), parts(lr)).param_groups
    ),
    "shards of a class": lambda lr: (
        ZeroRedundancyOptimizer(groups(lr), torch.optim.SGD, lr=0.1).param_groups
    ),
}


@pytest.mark.usefixtures("world_of_one")
def test_every_group_has_its_own() -> None:
    """Fault 15: groups and optimizers made from one tensor have separate values."""
    for name, made in MADE.items():
        with case(made=name):
            given = number()
            first, second = made(given)
            first["lr"].fill_(0.25)
            given.fill_(9.0)
            assert (first["lr"].item(), second["lr"].item()) == (0.25, 0.5)


def test_a_scheduler_moves_one_optimizer() -> None:
    """Fault 15: a scheduler changes neither another optimizer, nor the chain of both."""
    optimizer = adamw(number())
    own = [TorchOptimizer(params().values(), optimizer) for _ in range(2)]
    scheduler = StepLR(own[0], 1, gamma=0.5)
    for one in own:
        one.step()
    scheduler.step()
    assert [one.param_groups[0]["lr"].item() for one in own] == [0.25, 0.5]
    assert optimizer.hyper["lr"].item() == 0.5


def test_a_chain_has_its_own() -> None:
    """Fault 15: a chain copies its tensor, in each way of giving it one."""
    for name, made in {
        "made": sgd,
        "replaced": lambda lr: sgd(0.1).replace(lr=lr),
        "overridden": lambda lr: sgd(0.1).override(matching("*"), lr=lr),
        "inherited": lambda lr: chain(weight_decay(0.0), sgd(lr)),
        "of one element": lambda lr: sgd(lr.reshape(1, 1)),
    }.items():
        with case(made=name):
            given = number()
            optimizer = made(given)
            given.fill_(9.0)
            stepped, _ = _step(optimizer)
            assert stepped.tolist() == [0.5]


def _step(optimizer: Optimizer, **hyper: Any) -> tuple[Tensor, Any]:
    tree = {"w": torch.ones(1)}
    new, state = optimizer.update(tree, {"w": torch.ones(1)}, optimizer.init(tree), **hyper)
    return new["w"], state


def test_what_is_written_into_its_own_holds_from_the_next_step_on() -> None:
    optimizer = sgd(number())
    bound = optimizer.bind([torch.ones(1)])
    live = TorchOptimizer([torch.ones(1, requires_grad=True)], optimizer)
    optimizer.hyper["lr"].fill_(0.25)
    assert _step(optimizer)[0].tolist() == [0.75]
    bound.step([torch.ones(1)])
    assert bound.params[0].tolist() == [0.75]
    live.param_groups[0]["lr"].fill_(0.125)
    [param] = live.param_groups[0]["params"]
    param.grad = torch.ones(1)
    live.step()
    assert param.tolist() == [0.875]


def test_a_number_of_this_step_is_the_callers() -> None:
    given = number(0.25)
    assert _step(sgd(0.5), lr=given)[0].tolist() == [0.75]
    bound = sgd(0.5).bind([torch.ones(1)])
    bound.set_hyper(lr=given)
    given.fill_(9.0)
    bound.step([torch.ones(1)])
    assert bound.params[0].tolist() == [0.75]


def test_what_autograd_follows_stays_itself() -> None:
    """A tensor that requires gradients is not copied, so that autograd fills its gradient."""
    given = number().requires_grad_()
    optimizer = sgd(given)
    assert optimizer.hyper["lr"] is given
    _step(optimizer)[0].sum().backward()
    assert given.grad is not None
    assert given.grad.item() == -1.0
    slope = torch.func.grad(lambda lr: _step(sgd(lr))[0].sum())(number())
    assert slope.item() == -1.0
    batch = torch.vmap(lambda lr: _step(sgd(lr))[0])(torch.tensor([0.25, 0.5]))
    assert batch.tolist() == [[0.75], [0.5]]


def test_within_a_transform_a_plain_tensor_is_a_number() -> None:
    """torch.func tracks every copy made in a transform, so the tensor itself is kept."""
    outer = number()
    made: list[Optimizer] = []

    def loss(w: Tensor) -> Tensor:
        made.append(sgd(outer))
        new, _ = made[0].update({"w": w}, {"w": w}, made[0].init({"w": w}))
        return new["w"].sum()

    assert torch.func.grad(loss)(torch.ones(1)).tolist() == [0.5]
    assert made[0].hyper["lr"] is outer
    assert _step(made[0])[0].tolist() == [0.5]
