"""In one process: what steps, when, in which order, and what is refused."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import functional_optim
from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, clip_by_value, sgd
from hooks import apply_optimizer_in_backward
from hooks.in_backward import get_in_backward_optimizers

MAKERS: dict[str, tuple[Any, dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "torch SGD": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9},
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ),
    "torch AdamW": (
        torch.optim.AdamW,
        {"lr": 0.01, "foreach": False},
        lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    ),
    "a partial": (
        functools.partial(torch.optim.Adagrad, lr=0.1),
        {"eps": 1e-6},
        lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-6),
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


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(module: nn.Module, iteration: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(iteration))
    value: Tensor = module(x).square().sum()
    return value


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", MAKERS)
def test_same_as_the_plain_optimizer(name: str) -> None:
    optimizer_class, kwargs, plain = MAKERS[name]
    ours, twin = model(), model()
    apply_optimizer_in_backward(optimizer_class, ours.parameters(), kwargs)
    optimizer = plain(twin.parameters())
    for iteration in range(5):
        before = copy.deepcopy(ours)
        loss(ours, iteration).backward()
        optimizer.zero_grad()
        loss(twin, iteration).backward()
        optimizer.step()
        assert_same(ours, twin)
        assert all(param.grad is None for param in ours.parameters())
        assert not any(
            torch.equal(a, b) for a, b in zip(before.parameters(), ours.parameters(), strict=True)
        )


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

    apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})
    for optimizer in get_in_backward_optimizers(ours):
        optimizer.register_step_pre_hook(note)
    for iteration in range(2):
        loss(ours, iteration).backward()
    assert alive == with_grad == [1] * (2 * len(params))


def test_calls_stack_in_order() -> None:
    param = nn.Parameter(torch.ones(2))
    apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
    apply_optimizer_in_backward(adamw, [param], {"lr": 0.1})
    kinds = [type(one) for one in get_in_backward_optimizers(_holder(param))]
    assert kinds == [torch.optim.SGD, TorchOptimizer]
    twin = nn.Parameter(torch.ones(2))
    plain = [torch.optim.SGD([twin], lr=0.5), TorchOptimizer([twin], adamw(lr=0.1))]
    for _ in range(3):
        param.pow(3).sum().backward()
        twin.pow(3).sum().backward()
        for optimizer in plain:
            optimizer.step()
        twin.grad = None
        assert torch.equal(param, twin)
    reversed_ = nn.Parameter(torch.ones(2))  # decay after the step is another result
    apply_optimizer_in_backward(adamw, [reversed_], {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.SGD, [reversed_], {"lr": 0.5})
    for _ in range(3):
        reversed_.pow(3).sum().backward()
    assert not torch.equal(reversed_, twin)


def _holder(*params: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.params = nn.ParameterList(params)
    return module


def test_tied_parameters_step_once_by_the_whole_gradient() -> None:
    ours, twin = model(), model()
    for one in (ours, twin):
        torch.manual_seed(1)
        one[2].weight = nn.Parameter(torch.eye(8))
        one.append(nn.Linear(3, 8))
        one.append(nn.Linear(8, 8))
        one[6].weight = one[2].weight
    apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": 0.1, "momentum": 0.9})
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for iteration in range(3):
        loss(ours, iteration).backward()
        plain.zero_grad()
        loss(twin, iteration).backward()
        plain.step()
        assert_same(ours, twin)
    assert len(get_in_backward_optimizers(ours)) == len(list(ours.parameters()))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_listed_twice_is_stepped_twice_as_by_torch() -> None:
    ours, twin = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    apply_optimizer_in_backward(torch.optim.SGD, [ours, ours], {"lr": 0.125})
    plain = torch.optim.SGD([twin, twin], lr=0.125)
    for one in (ours, twin):
        one.pow(2).sum().backward()
    plain.step()
    assert torch.equal(ours, twin)


def test_groups_by_calls_and_by_dicts() -> None:
    by_calls, by_dicts, twin = model(), model(), model()
    weights = [one.weight for one in by_calls if isinstance(one, nn.Linear)]
    biases = (one.bias for one in by_calls if isinstance(one, nn.Linear))  # a generator
    apply_optimizer_in_backward(torch.optim.SGD, weights, {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.SGD, biases, {"lr": 0.1, "momentum": 0.5})

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [
            {"params": (param for name, param in named if "weight" in name)},
            {"params": [param for name, param in named if "bias" in name], "momentum": 0.5},
        ]

    apply_optimizer_in_backward(torch.optim.SGD, groups(by_dicts), {"lr": 0.1})
    plain = torch.optim.SGD(groups(twin), lr=0.1)
    for iteration in range(3):
        plain.zero_grad()
        for one in (by_calls, by_dicts, twin):
            loss(one, iteration).backward()
        plain.step()
        assert_same(by_calls, twin)
        assert_same(by_dicts, twin)
    assert by_dicts[0].bias._optimizer_kwargs == [{"lr": 0.1, "momentum": 0.5}]


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
    apply_optimizer_in_backward(torch.optim.SGD, ours[0].parameters(), {"lr": 0.1})
    assert get_in_backward_optimizers(ours) == _get_in_backward_optimizers(ours)
    assert len(get_in_backward_optimizers(ours)) == 2
    assert ours[0].bias._optimizer_classes == [torch.optim.SGD]
    assert ours[0].bias._optimizer_kwargs == [{"lr": 0.1}]
    scheduler = torch.optim.lr_scheduler.StepLR(ours[0].bias._in_backward_optimizers[0], 1, 0.5)
    loss(ours, 0).backward()
    scheduler.step()
    assert ours[0].bias._in_backward_optimizers[0].param_groups[0]["lr"] == 0.05


def test_without_hook_nothing_steps() -> None:
    ours = model()
    before = copy.deepcopy(ours)
    apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": 0.1}, False)
    loss(ours, 0).backward()
    assert_same(ours, before)
    assert all(param.grad is not None for param in ours.parameters())
    assert len(get_in_backward_optimizers(ours)) == 6


def test_every_backward_is_a_step() -> None:
    param = nn.Parameter(torch.zeros(1))
    apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 1.0})
    value = (2.0 * param).sum()
    value.backward(retain_graph=True)
    value.backward()
    assert param.item() == -4.0
    unused = nn.Parameter(torch.ones(1))
    apply_optimizer_in_backward(torch.optim.AdamW, [unused], {"lr": 1.0})
    (2.0 * param).sum().backward()
    assert unused.item() == 1.0 and param.item() == -6.0


def test_nothing_is_kept_alive() -> None:
    ours = model()
    gone = [weakref.ref(param) for param in ours.parameters()]
    apply_optimizer_in_backward(adamw, ours.parameters(), {"lr": 0.1})
    loss(ours, 0).backward()
    del ours
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


class Stranger:
    """A class that is no optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        self.lr = lr


REFUSED: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "a tensor": (sgd, torch.ones(2), {}, TypeError, "got Tensor; put a single one into a list"),
    "a number": (sgd, 3, {}, TypeError, "got int"),
    "no tensor": (sgd, [1.0], {}, TypeError, r"params\[0\] must be a parameter .*, got float"),
    "a dict without params": (sgd, [{"lr": 1.0}], {}, ValueError, "without 'params'"),
    "nothing": (sgd, iter(()), {}, ValueError, "no parameter; was it a generator"),
    "no leaf": (
        sgd,
        [nn.Parameter(torch.ones(1)) * 2],
        {},
        ValueError,
        r"params\[0\] is no leaf: it was computed \(<MulBackward0",
    ),
    "frozen": (sgd, [("w", torch.ones(1))], {}, ValueError, "w requires no gradient"),
    "measured": (
        chain(clip_by_global_norm(1.0), sgd(lr=0.1)),
        [nn.Parameter(torch.ones(1))],
        {},
        ValueError,
        "clip_by_global_norm needs the gradients of all parameters",
    ),
    "a closure": (
        torch.optim.LBFGS,
        [nn.Parameter(torch.ones(1))],
        {},
        ValueError,
        "LBFGS evaluates the model several times",
    ),
    "no class": ("sgd", [nn.Parameter(torch.ones(1))], {}, TypeError, "got 'sgd'"),
    "another class": (
        Stranger,
        [nn.Parameter(torch.ones(1))],
        {"lr": 1.0},
        TypeError,
        r"must make a torch.optim.Optimizer of \[param\], got Stranger",
    ),
    "a transform": (
        clip_by_value,
        [nn.Parameter(torch.ones(1))],
        {"clip_value": 1.0},
        TypeError,
        "optimizer must be a functional_optim.Optimizer",
    ),
    "an unknown hyper-parameter": (
        adamw(),
        [nn.Parameter(torch.ones(1))],
        {"momentum": 0.9},
        TypeError,
        "momentum",
    ),
    "out of bounds": (
        torch.optim.SGD,
        [nn.Parameter(torch.ones(1))],
        {"lr": -1.0},
        ValueError,
        "Invalid learning rate",
    ),
    "no dict": (sgd, [nn.Parameter(torch.ones(1))], None, TypeError, "must be a dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_changed(name: str) -> None:
    optimizer_class, params, kwargs, error, text = REFUSED[name]
    fine = nn.Parameter(torch.ones(3))
    if isinstance(params, list):
        params = [fine, *params]
        text = text.replace("[0\\]", "[1\\]")
    with pytest.raises(error, match=text):
        apply_optimizer_in_backward(optimizer_class, params, kwargs)
    assert not hasattr(fine, "_in_backward_optimizers")
    fine.sum().backward()
    assert torch.equal(fine, torch.ones(3)) and fine.grad is not None


def test_an_error_names_the_parameter() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        apply_optimizer_in_backward(torch.optim.SGD, model().named_parameters(), {"lr": -1.0})
    assert caught.value.__notes__ == ["(the optimizer of 0.weight, of shape (8, 6))"]


def test_applied_before_there_is_a_world() -> None:
    ours, twin = model(), model()
    apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": 0.1})
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(ours)
        for iteration in range(3):
            loss(ddp, iteration).backward()
            plain.zero_grad()
            loss(twin, iteration).backward()
            plain.step()
            assert_same(ours, twin)
            assert all(param.grad is None for param in ours.parameters())
    finally:
        dist.destroy_process_group()
