"""State before the first step: values that a caller writes, and state that copies a parameter."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adagrad,
    adamw,
    apply_if_finite,
    chain,
    ema,
    partition,
    prodigy,
    rprop,
    sgd,
)
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import each

Make = Callable[[Sequence[Tensor], Optimizer], Any]

DOORS: dict[str, Make] = {
    "TorchOptimizer": TorchOptimizer,
    "ZeRO": lambda params, optimizer: ZeroRedundancyOptimizer(
        params, optimizer, LocalWorld(1).groups[0]
    ),
}
PAIRS: dict[str, tuple[Optimizer, Any, str]] = {
    "adagrad": (adagrad(lr=0.1), lambda own: torch.optim.Adagrad(own, 0.1, foreach=False), "sum"),
    "sgd": (
        sgd(lr=0.1, momentum=0.9),
        lambda own: torch.optim.SGD(own, 0.1, momentum=0.9, foreach=False),
        "momentum_buffer",
    ),
}


def _state_of(optimizer: Any, param: Tensor) -> Any:
    """Return the dict of state that the optimizer steps."""
    return getattr(optimizer, "optim", optimizer).state[param]


def _weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2)]


@each(door=DOORS, name=PAIRS, in_place=[False, True])
def test_what_is_written_there_is_stepped_from(door: str, name: str, in_place: bool) -> None:
    """A step uses state that the caller wrote, as torch's class does: a warm start."""
    optimizer, theirs, key = PAIRS[name]
    weights = _weights()
    pair = DOORS[door]([weights[0]], optimizer), theirs([weights[1]])
    values = torch.tensor([8.0, 1.0, 2.0])
    for one, weight in zip(pair, weights, strict=True):
        state = _state_of(one, weight)
        if in_place and key in state:
            state[key].copy_(values)
        else:
            state[key] = values.clone()
        for _ in range(2):
            weight.grad = torch.ones(3)
            one.step()
    assert torch.equal(*weights)


@each(door=DOORS, in_a_part=[False, True])
def test_a_count_that_is_set_back_leaves_the_averages(door: str, in_a_part: bool) -> None:
    """Averages stay if the caller resets a step count, as in torch's class and planned steps."""
    weights, optimizer = _weights(), adamw(lr=0.1)
    if in_a_part:
        parts = {"long": optimizer, "short": sgd(0.1)}
        optimizer = partition(parts, lambda _, shape: "long" if shape == (3,) else "short")
    pair = (
        DOORS[door]([weights[0]], optimizer),
        torch.optim.AdamW([weights[1]], lr=0.1, foreach=False),
    )
    for one, weight in zip(pair, weights, strict=True):
        for step in range(5):
            if step == 3:
                _state_of(one, weight)["step"].zero_()
            weight.grad = torch.arange(3.0) + 1
            one.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("door", DOORS)
def test_a_state_that_starts_as_a_hyper_parameter_starts_as_that_of_the_first_step(
    door: str,
) -> None:
    """Rprop's step sizes start as ``lr``, which may have changed since construction."""
    weights = _weights()
    pair = (
        DOORS[door]([weights[0]], rprop(lr=0.1)),
        torch.optim.Rprop([weights[1]], lr=0.1, foreach=False),
    )
    for one, weight in zip(pair, weights, strict=True):
        one.param_groups[0]["lr"] = 0.01
        for _ in range(3):
            weight.grad = torch.ones(3)
            one.step()
    assert torch.equal(*weights)


def test_a_group_may_get_the_options_of_another_before_its_first_step() -> None:
    """The state of a group is made again if its own options changed, whatever other groups have."""
    found = []
    for ours in (True, False):
        params = _weights()
        groups: list[Any] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1}]
        optimizer: Any = torch.optim.Rprop(groups, lr=0.01, foreach=False)
        if ours:
            optimizer = TorchOptimizer(groups, rprop(lr=0.01))
        optimizer.param_groups[1]["lr"] = 0.01
        for _ in range(3):
            for param in params:
                param.grad = torch.ones(3)
            optimizer.step()
        found.append(torch.cat(params))
    assert torch.equal(*found)


@each(with_gradient=[[0, 1, 2], [1]], reverse=[False, True])
def test_a_parameter_may_move_to_another_group_before_its_first_step(
    with_gradient: list[int], reverse: bool
) -> None:
    """The first step sizes of Rprop are the rate of the group of the first step, as in torch."""
    found = []
    for ours in (True, False):
        params = [torch.ones(2) for _ in range(3)]
        groups: list[Any] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
        optimizer: Any = torch.optim.Rprop(groups, lr=0.1, foreach=False)
        if ours:
            optimizer = TorchOptimizer(groups, rprop(lr=0.1))
        first, second = (group["params"] for group in optimizer.param_groups)
        second.append(first.pop())
        if reverse:
            second.reverse()
        for k in with_gradient:
            params[k].grad = torch.ones(2)
        optimizer.step()
        sizes = [optimizer.state[params[k]]["step_size"] for k in with_gradient]
        found.append(torch.cat(params + sizes))
    assert torch.equal(*found)


@pytest.mark.parametrize("door", DOORS)
def test_shared_scalars_start_as_the_options_of_the_first_step(door: str) -> None:
    """Prodigy's distance starts as ``d0``, which may have changed since construction."""
    weights = _weights()
    pair = DOORS[door]([weights[0]], prodigy()), DOORS[door]([weights[1]], prodigy(d0=0.5))
    pair[0].param_groups[0]["d0"] = 0.5
    for one, weight in zip(pair, weights, strict=True):
        for _ in range(3):
            weight.grad = torch.ones(3)
            one.step()
    assert torch.equal(*weights)


@each(
    first=[[], [float("nan")], [float("nan"), float("nan")]],
    gate=["apply_if_finite", "accumulate"],
    door=["TorchOptimizer", "ZeRO"],
)
def test_an_average_starts_from_the_weights_of_the_first_step(
    first: list[float], gate: str, door: str
) -> None:
    """Calls in which a gate allows no step do not start the average."""
    opens = apply_if_finite(3) if gate == "apply_if_finite" else accumulate(len(first) + 1)
    (weight, _), optimizer = _weights(), chain(opens, sgd(lr=1.0), ema(0.5))
    front = DOORS[door]([weight], optimizer)
    for grad in first:
        weight.grad = torch.full((3,), grad if gate == "apply_if_finite" else 1.0)
        front.step()
    with torch.no_grad():
        weight.fill_(10.0)  # stands for loaded weights
    weight.grad = torch.ones(3)
    front.step()
    assert weight.tolist() == [9.0] * 3
    (seen,) = front.view()
    assert seen.tolist() == [9.5] * 3


@each(gate=[[], [apply_if_finite(3)], [accumulate(1)]], door=["TorchOptimizer", "ZeRO"])
def test_with_a_count_that_is_set_back_an_average_starts_again(gate: list[Any], door: str) -> None:
    """The average also starts again behind a gate, and after planned steps of the same kind."""
    (weight, _), optimizer = _weights(), chain(*gate, sgd(lr=1.0), ema(0.5))
    front = DOORS[door]([weight], optimizer)
    for step in range(5):
        if step == 4:
            _state_of(front, weight)["step"].zero_()
            with torch.no_grad():
                weight.fill_(10.0)
        weight.grad = torch.ones(3)
        front.step()
    (seen,) = front.view()
    assert seen.tolist() == [9.5] * 3


def test_with_a_count_that_is_set_back_the_average_of_a_parameter_with_gaps_starts_again() -> None:
    """A planned step steps such a parameter alone."""
    weights = [torch.nn.Parameter(torch.ones(6)[::2]), *_weights()]
    optimizer = TorchOptimizer(weights, chain(sgd(lr=1.0), ema(0.5)))
    for step in range(5):
        if step == 4:
            _state_of(optimizer, weights[0])["step"].zero_()
            with torch.no_grad():
                weights[0].fill_(10.0)
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.view()[0].tolist() == [9.5] * 3


def test_a_state_whose_parameter_has_another_dtype_by_now_is_made_anew() -> None:
    weights = _weights()
    pair = (
        TorchOptimizer([weights[0]], adamw(lr=0.1)),
        torch.optim.AdamW([weights[1]], lr=0.1, foreach=False),
    )
    for one, weight in zip(pair, weights, strict=True):
        weight.data = weight.data.double()
        for entries in one.state_dict()["state"].values():  # torch's class has no state yet
            assert entries["exp_avg"].dtype == torch.float64
        for _ in range(3):
            weight.grad = torch.arange(3.0, dtype=torch.float64) - 1
            one.step()
        assert _state_of(one, weight)["exp_avg"].dtype == torch.float64
    assert torch.equal(*weights)


@each(door=DOORS, warm_up=[False, True])
def test_a_scheduler_fills_a_learning_rate_before_the_first_step(door: str, warm_up: bool) -> None:
    """A scheduler may change a tensor ``lr`` in place before state is initialized with it."""
    found = []
    for ours in (True, False):
        param = torch.nn.Parameter(torch.ones(3))
        rate: Any = torch.tensor(0.1)
        optimizer: Any = torch.optim.Rprop([param], lr=rate)
        if ours:
            optimizer = DOORS[door]([param], rprop(lr=rate))
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 5.0)
        if warm_up:
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)
        for step in range(4):
            param.grad = torch.tensor([1.0, -0.5, 0.25]) * (-1 if step == 1 else 1)
            optimizer.step()
            scheduler.step()
        found.append(param.detach().clone())
    assert torch.equal(*found)


@each(door=DOORS)
def test_a_refused_load_before_the_first_step_changes_nothing(door: str) -> None:
    """The state still starts with the options of the first step, and not with those before."""
    found = []
    for is_refused in (True, False):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = DOORS[door]([param], rprop(lr=0.1))
        if is_refused:
            saved = optimizer.state_dict()
            saved["param_groups"][0]["lr"] = -1.0
            with pytest.raises(ValueError, match="lr must be"):
                optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = 0.5
        param.grad = torch.ones(3)
        optimizer.step()
        found.append(param.detach().clone())
    assert torch.equal(*found)
