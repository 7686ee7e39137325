"""Averaged weights: read by name, and swapped into a model for evaluation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    ema,
    labels,
    partition,
    schedule_free_sgd,
    sgd,
    with_shape,
)
from sharding import ZeroRedundancyOptimizer

matrices = with_shape(lambda shape: len(shape) == 2)

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "average": lambda: chain(sgd(lr=0.1), ema(0.5)),
    "schedule-free": lambda: schedule_free_sgd(lr=0.1),
    "parts": lambda: chain(
        partition(
            {"no": sgd(lr=0.2), "matrix": adamw(lr=0.1)}, labels({"matrix": matrices}, default="no")
        ),
        ema(0.5),
    ),
}


def zero(params: Any, optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optimizer, parameters_as_bucket_view=True)


DOORS: dict[str, Callable[[Any, Optimizer], Any]] = {
    "TorchOptimizer": TorchOptimizer,
    "ZeRO": zero,
}

each_door = pytest.mark.parametrize("door", DOORS)


pytestmark = pytest.mark.usefixtures("world_of_one")


def trained(door: str, name: str, *, named: bool = True) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    params = model.named_parameters() if named else model.parameters()
    optimizer = DOORS[door](params, OPTIMIZERS[name]())
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(8.0).reshape(4, 2)).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def wanted(name: str) -> dict[str, Tensor]:
    """Return the averages that the pure optimizer computes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = OPTIMIZERS[name]()
    params = dict(model.named_parameters())
    with torch.no_grad():
        state = optimizer.init(params)
    for _ in range(3):
        model.zero_grad()
        model(torch.arange(8.0).reshape(4, 2)).square().mean().backward()
        with torch.no_grad():
            optimizer.update_(params, {key: one.grad for key, one in params.items()}, state)
    with torch.no_grad():
        return {key: one.clone() for key, one in optimizer.view(params, state).items()}


@each_door
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_views_are_by_name(door: str, name: str) -> None:
    """Fault 8: ``view`` returned a list in the order of the groups, which a partition changes."""
    _, optimizer = trained(door, name)
    assert same(optimizer.view(), wanted(name))


@each_door
def test_views_of_parameters_without_names_are_in_the_order_of_groups(door: str) -> None:
    model, optimizer = trained(door, "parts", named=False)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = optimizer.view()
    assert [one.shape for one in found] == [one.shape for one in params]
    names = {id(one): name for name, one in model.named_parameters()}
    expected = wanted("parts")
    assert all(torch.equal(v, expected[names[id(p)]]) for v, p in zip(found, params, strict=True))


@each_door
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_is_evaluated_with_averages_and_trained_on(
    door: str, name: str, named: bool
) -> None:
    """Fault 8: no method put the averages into a model."""
    model, optimizer = trained(door, name, named=named)
    twin, other = trained(door, name, named=named)
    before, averages = values(model), wanted(name)
    grads = [param.grad for param in model.parameters()]
    addresses = [param.data_ptr() for param in model.parameters()]
    for is_grad_on in (True, False):
        with torch.set_grad_enabled(is_grad_on), optimizer.averaged(model):
            assert torch.is_grad_enabled() == is_grad_on
            assert same(values(model), averages)
            model.eval()(torch.ones(1, 2))
        assert same(values(model), before)
    model.train()
    assert [param.data_ptr() for param in model.parameters()] == addresses
    assert all(one.grad is grad for one, grad in zip(model.parameters(), grads, strict=True))
    for one, its in ((model, optimizer), (twin, other)):
        step(one, its)
    assert same(values(model), values(twin))


def fail(error: type[BaseException], model: nn.Module, before: dict[str, Tensor]) -> None:
    assert not same(values(model), before)
    raise error


@each_door
def test_parameters_come_back_after_an_exception(door: str) -> None:
    """Fault 8: parameters are restored after an exception, an interrupt, or a closed generator."""
    model, optimizer = trained(door, "average")
    before = values(model)
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), optimizer.averaged(model):
            fail(error, model, before)
        assert same(values(model), before)
    step(model, optimizer)


def again(model: nn.Module, optimizer: Any) -> None:
    with optimizer.averaged(model):
        pass


@each_door
@pytest.mark.parametrize(
    "call",
    [
        lambda model, optimizer: optimizer.step(),
        lambda model, optimizer: optimizer.view(),
        lambda model, optimizer: optimizer.load_state_dict({}),
        again,
    ],
)
def test_what_would_take_averages_for_parameters_is_refused(door: str, call: Any) -> None:
    model, optimizer = trained(door, "schedule-free")
    before = values(model)
    with (
        pytest.raises(RuntimeError, match=r"averages now, inside of `with optimizer.averaged"),
        optimizer.averaged(model),
    ):
        call(model, optimizer)
    assert same(values(model), before)
    step(model, optimizer)
    optimizer.view()


@each_door
def test_who_writes_to_a_parameter_is_told(door: str) -> None:
    """A write to a parameter inside of ``averaged`` raises, such as one by a backward hook."""
    model, optimizer = trained(door, "average")
    before = values(model)
    with (
        pytest.raises(RuntimeError, match="a parameter was written to inside"),
        optimizer.averaged(model),
        torch.no_grad(),
    ):
        model[0].weight.add_(1.0)
    assert same(values(model), before)


def test_parameters_of_others_are_left_alone() -> None:
    model, optimizer = trained("TorchOptimizer", "average")
    both = nn.ModuleList([model, nn.Linear(2, 2)])
    before = values(both[1])
    with optimizer.averaged(both):
        assert same(values(model), wanted("average"))
        assert same(values(both[1]), before)
    with optimizer.averaged(model[0]):
        assert torch.equal(model[0].weight, wanted("average")["0.weight"])
        assert not torch.equal(model[2].weight, wanted("average")["2.weight"])
    with (
        pytest.raises(ValueError, match="no parameter of this Linear is one of this optimizer's 6"),
        optimizer.averaged(both[1]),
    ):
        pass


def test_two_parameters_of_one_name_have_no_mapping() -> None:
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizer = TorchOptimizer(
        [{"params": model.named_parameters()} for model in models], chain(sgd(), ema(0.5))
    )
    with pytest.raises(ValueError, match="two parameters have the name 'weight'"):
        optimizer.view()


def test_a_copy_that_was_made_inside_can_step() -> None:
    model, optimizer = trained("TorchOptimizer", "average")
    with optimizer.averaged(model):
        twin, other = copy.deepcopy((model, optimizer))
    step(twin, other)
