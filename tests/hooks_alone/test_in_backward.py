"""Optimizers in backward: which parameters step, when, and in which order."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import functional_optim
from functional_optim import TorchOptimizer, adamw, chain, clip_by_value, sgd
from hooks import apply_optimizer_in_backward
from hooks.in_backward import get_in_backward_optimizers, reduce_in_backward
from tests.choices import case

from .support import assert_same, assert_steps_as, loss, model

SGD, AdamW, Adagrad = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad
MAKERS: dict[str, tuple[Any, dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "torch SGD": (
        SGD,
        {"lr": 0.1, "momentum": 0.9},
        lambda params: SGD(params, lr=0.1, momentum=0.9),
    ),
    "torch AdamW": (
        AdamW,
        {"lr": 0.01, "foreach": False},
        lambda params: AdamW(params, lr=0.01, foreach=False),
    ),
    "a partial": (
        functools.partial(Adagrad, lr=0.1),
        {"eps": 1e-6},
        lambda params: Adagrad(params, lr=0.1, eps=1e-6),
    ),
    "ours": (
        chain(clip_by_value(0.01), adamw(lr=0.01)),
        {},
        lambda params: TorchOptimizer(params, chain(clip_by_value(0.01), adamw(lr=0.01))),
    ),
    "ours, replaced": (
        adamw(lr=7.0),
        {"lr": 0.01},
        lambda params: TorchOptimizer(params, adamw(lr=0.01)),
    ),
    "our constructor": (
        functional_optim.adamw,
        {"lr": 0.01, "amsgrad": True},
        lambda params: TorchOptimizer(params, adamw(lr=0.01, amsgrad=True)),
    ),
    "our class": (
        TorchOptimizer,
        {"optimizer": sgd(lr=0.1)},
        lambda params: TorchOptimizer(params, sgd(lr=0.1)),
    ),
}


def test_same_as_the_plain_optimizer() -> None:
    for name, (optimizer_class, kwargs, plain) in MAKERS.items():
        ours, twin = model(), model()
        apply_optimizer_in_backward(optimizer_class, ours.parameters(), kwargs)
        with case(maker=name):
            assert_steps_as(ours, twin, plain(twin.parameters()))


def test_one_gradient_is_alive_at_a_time() -> None:
    ours = model()
    params = list(ours.parameters())
    gradients: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    with_grad: list[int] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        param = optimizer.param_groups[0]["params"][0]
        gradients.append(weakref.ref(param.grad))
        alive.append(sum(one() is not None for one in gradients))
        with_grad.append(sum(one.grad is not None for one in params))

    apply_optimizer_in_backward(SGD, params, {"lr": 0.1})
    for optimizer in get_in_backward_optimizers(ours):
        optimizer.register_step_pre_hook(note)
    for iteration in range(2):
        loss(ours, iteration).backward()
    assert alive == with_grad == [1] * (2 * len(params))


def test_calls_stack_in_order() -> None:
    ours, reversed_, twin = (nn.ParameterList([torch.ones(2)]) for _ in range(3))
    half, decaying = (SGD, {"lr": 0.5}), (adamw, {"lr": 0.1})
    for optimizer_class, kwargs in (half, decaying):
        apply_optimizer_in_backward(optimizer_class, ours.parameters(), kwargs)
    for optimizer_class, kwargs in (decaying, half):  # decay after the step gives another result
        apply_optimizer_in_backward(optimizer_class, reversed_.parameters(), kwargs)
    assert [type(one) for one in get_in_backward_optimizers(ours)] == [SGD, TorchOptimizer]
    plain = [SGD(twin.parameters(), lr=0.5), TorchOptimizer(twin.parameters(), adamw(lr=0.1))]
    for _ in range(3):
        for one in (ours, reversed_, twin):
            one[0].pow(3).sum().backward()
        for optimizer in plain:
            optimizer.step()
        twin[0].grad = None
        assert_same(ours, twin)
    assert not torch.equal(reversed_[0], twin[0])


def test_tied_parameters_step_once_by_the_whole_gradient() -> None:
    ours, twin = model(), model()
    for one in (ours, twin):
        torch.manual_seed(1)
        one[2].weight = nn.Parameter(torch.eye(8))
        one.append(nn.Linear(3, 8))
        one.append(nn.Linear(8, 8))
        one[6].weight = one[2].weight
    apply_optimizer_in_backward(SGD, ours.parameters(), {"lr": 0.001, "momentum": 0.9})
    assert_steps_as(ours, twin, SGD(twin.parameters(), lr=0.001, momentum=0.9))
    assert len(get_in_backward_optimizers(ours)) == len(list(ours.parameters()))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_listed_twice_is_stepped_twice_as_by_torch() -> None:
    ours, twin = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    apply_optimizer_in_backward(SGD, [ours, ours], {"lr": 0.125})
    plain = SGD([twin, twin], lr=0.125)
    for one in (ours, twin):
        one.pow(2).sum().backward()
    plain.step()
    assert torch.equal(ours, twin)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return a group of weights, by a generator, and a group of biases with momentum."""
    named = list(module.named_parameters())
    return [
        {"params": (param for name, param in named if "weight" in name)},
        {"params": [param for name, param in named if "bias" in name], "momentum": 0.5},
    ]


def test_groups_by_calls_and_by_dicts() -> None:
    by_calls, by_dicts = model(), model()
    for group in groups(by_calls):
        params = group.pop("params")
        apply_optimizer_in_backward(SGD, params, {"lr": 0.01, **group})
    apply_optimizer_in_backward(SGD, groups(by_dicts), {"lr": 0.01})
    for ours in (by_calls, by_dicts):
        twin = model()
        assert_steps_as(ours, twin, SGD(groups(twin), lr=0.01))
    assert by_dicts[0].bias._optimizer_kwargs == [{"lr": 0.01, "momentum": 0.5}]


def test_group_of_one_tensor_and_pairs_with_names() -> None:
    ours = model()
    apply_optimizer_in_backward(sgd(lr=0.1), [{"params": ours[0].weight, "lr": 0.0}], {})
    apply_optimizer_in_backward(sgd, ours[2].named_parameters(), {"lr": 0.1})
    before = copy.deepcopy(ours)
    loss(ours, 0).backward()
    assert torch.equal(before[0].weight, ours[0].weight) and ours[0].weight.grad is None
    assert not torch.equal(before[2].bias, ours[2].bias)
    assert ours[4].weight.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_attributes_that_torch_has() -> None:
    from torch.distributed.optim import _get_in_backward_optimizers

    ours = model()
    apply_optimizer_in_backward(SGD, ours[0].parameters(), {"lr": 0.1})
    assert get_in_backward_optimizers(ours) == _get_in_backward_optimizers(ours)
    assert len(get_in_backward_optimizers(ours)) == 2
    assert ours[0].bias._optimizer_classes == [SGD]
    assert ours[0].bias._optimizer_kwargs == [{"lr": 0.1}]
    scheduler = torch.optim.lr_scheduler.StepLR(ours[0].bias._in_backward_optimizers[0], 1, 0.5)
    loss(ours, 0).backward()
    scheduler.step()
    assert ours[0].bias._in_backward_optimizers[0].param_groups[0]["lr"] == 0.05


def test_without_hook_nothing_steps() -> None:
    ours = model()
    before = copy.deepcopy(ours)
    apply_optimizer_in_backward(SGD, ours.parameters(), {"lr": 0.1}, False)
    loss(ours, 0).backward()
    assert_same(ours, before)
    assert all(param.grad is not None for param in ours.parameters())
    assert len(get_in_backward_optimizers(ours)) == 6


def test_every_backward_is_a_step() -> None:
    param, unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    apply_optimizer_in_backward(SGD, [param], {"lr": 1.0})
    apply_optimizer_in_backward(AdamW, [unused], {"lr": 1.0})
    value = (2.0 * param).sum()
    value.backward(retain_graph=True)
    value.backward()
    assert param.item() == -4.0 and unused.item() == 1.0


def test_nothing_is_kept_alive() -> None:
    ours = model()
    gone = [weakref.ref(param) for param in ours.parameters()]
    apply_optimizer_in_backward(adamw, ours.parameters(), {"lr": 0.1})
    loss(ours, 0).backward()
    del ours
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_applied_before_there_is_a_world(request: pytest.FixtureRequest) -> None:
    ours, twin = model(), model()
    apply_optimizer_in_backward(SGD, ours.parameters(), {"lr": 0.01})
    request.getfixturevalue("world_of_one")
    ddp = DistributedDataParallel(ours)
    reduce_in_backward(ddp)
    assert_steps_as(ddp, twin, SGD(twin.parameters(), lr=0.01))
