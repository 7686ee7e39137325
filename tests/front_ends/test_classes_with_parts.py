"""Registered classes whose functional equivalent has parts, overrides or shared scalars."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    as_functional_optim,
    from_torch,
    labels,
    matching,
    partition,
    prodigy,
    register_functional_optim,
    sgd,
    to_torch_state_dict,
    with_shape,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.frontends.registry import _REGISTERED
from hooks import step_hook
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import each_value
from tests.worlds import world_of_one


def with_two_rates(lr: float = 0.125) -> Optimizer:
    parts = {"matrices": sgd(lr=lr), "vectors": sgd(lr=2 * lr)}
    return partition(parts, labels({"matrices": matching("*weight")}, default="vectors"))


EQUIVALENTS: dict[str, Callable[..., Optimizer]] = {
    "parts": with_two_rates,
    "an override": lambda lr=0.125: sgd(lr=lr).override(matching("*bias"), lr=2 * lr),
    "shared scalars": lambda lr=0.125: prodigy(lr=lr),
}


@pytest.fixture(name="own_class", params=list(EQUIVALENTS))
def _own_class(request: pytest.FixtureRequest) -> Iterator[Any]:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.125) -> None:
            super().__init__(params, {"lr": lr})

    register_functional_optim(Own, EQUIVALENTS[request.param])
    yield Own
    _REGISTERED.pop(Own)


DOORS: dict[str, Callable[[Any, Any], Any]] = {
    "sharded": lambda params, cls: LocalWorld(1).run(
        lambda group: ZeroRedundancyOptimizer(params, cls, process_group=group)
    ),
    "local": lambda params, cls: local_optimizer(cls, params),
}


@each_value(door=list(DOORS))
def test_such_a_class_is_refused(own_class: Any, door: str) -> None:
    """All stages of all parts acted on each parameter, and shared scalars were not saved."""
    params = list(torch.nn.Linear(3, 2).named_parameters())
    with pytest.raises(TypeError, match=r"pass the equivalent itself, as in as_functional_optim"):
        DOORS[door](params, own_class)


@each_value(door=list(DOORS), kind=list(EQUIVALENTS), late=[False, True])
def test_an_option_for_such_an_equivalent_is_refused(door: str, kind: str, late: bool) -> None:
    """A selector and an override of the equivalent were ignored, without an error."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.125, special: bool = False) -> None:
            super().__init__(params, {"lr": lr, "special": special})

    def equivalent(lr: float = 0.125, special: bool = False) -> Optimizer:
        return EQUIVALENTS[kind](lr) if special else sgd(lr=lr)

    register_functional_optim(Own, equivalent)
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    before = [param.detach().clone() for param in layer.parameters()]
    option = {} if late else {"special": True}

    def run(group: Any) -> None:
        groups = [{"params": list(layer.named_parameters()), **option}]
        if door == "sharded":
            one: Any = ZeroRedundancyOptimizer(groups, Own, process_group=group)
        else:
            one = local_optimizer(Own, groups)
        one.param_groups[0]["special"] = True
        if door == "sharded":
            one.step()
        else:
            one.step_by([param.grad for param in layer.parameters()])

    try:
        with pytest.raises(TypeError, match="pass the equivalent itself"):
            LocalWorld(1).run(run)
    finally:
        _REGISTERED.pop(Own)
    assert all(map(torch.equal, layer.parameters(), before))


@pytest.mark.parametrize("own_class", ["parts", "shared scalars"], indirect=True)
def test_from_torch_needs_one_chain(own_class: Any) -> None:
    """The scalars that parameters share began anew, without an error."""
    live = own_class(torch.nn.Linear(3, 2).named_parameters())
    with pytest.raises(TypeError, match="from_torch takes optimizers with one chain"):
        from_torch(live)


def test_overrides_by_shape_are_converted_both_ways() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.125, momentum: float = 0.5) -> None:
            super().__init__(params, lr=lr, momentum=momentum)

    register_functional_optim(
        Own,
        lambda lr=0.125, momentum=0.5: sgd(lr=lr, momentum=momentum).override(
            with_shape(ndim=1), lr=2 * lr
        ),
    )
    layer = torch.nn.Linear(3, 2)
    live = Own(layer.named_parameters())
    layer(torch.ones(1, 3)).sum().backward()
    live.step()
    optimizer, params, state = from_torch(live)
    new, _ = optimizer.update(params, ({"weight": None, "bias": torch.ones(2)},), state)
    # The momentum is 0.5 * 1 + 1, and the override doubles the learning rate.
    assert torch.equal(new[0]["bias"], layer.bias.detach() - 0.25 * 1.5)
    bias = [params[0]["bias"]]
    one = optimizer.init(bias)
    saved = to_torch_state_dict(optimizer, bias, one, torch.optim.SGD, options={"lr": 0.25})
    assert saved["param_groups"][0]["momentum"] == 0.5


def test_its_equivalent_is_accepted(own_class: Any) -> None:
    params = list(torch.nn.Linear(3, 2).named_parameters())
    for make in DOORS.values():
        make(params, as_functional_optim(own_class, lr=0.25))


def test_a_step_hook_takes_such_a_class() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.125) -> None:
            super().__init__(params, {"lr": lr})

    register_functional_optim(Own, with_two_rates)
    with world_of_one():
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        before = {name: one.detach().clone() for name, one in ddp.module.named_parameters()}
        step_hook(ddp, Own, lr=0.25)
        ddp(torch.ones(1, 1)).sum().backward()
        for name, rate in {"weight": 0.25, "bias": 0.5}.items():
            now = ddp.module.get_parameter(name).detach()
            assert torch.equal(now, before[name] - rate)
