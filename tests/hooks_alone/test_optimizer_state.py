"""OptimizerState: its arguments, ``set_hyper``, and the start of its state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import TorchOptimizer, adamw, schedule_free_sgd, sgd
from hooks import OptimizerState, step_hook
from tests.choices import case
from tests.ddp.models import WIDTH, Tower


class Alone(torch.optim.SGD):
    """Optimizer class that nobody has registered."""


pytestmark = pytest.mark.usefixtures("world_of_one")


def test_it_takes_what_every_front_end_takes() -> None:
    """A class with options, a constructor, and an optimizer give the same steps."""
    made = []
    for given, options in (
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (adamw, {"lr": 0.1, "amsgrad": True}),
        (adamw(amsgrad=True), {"lr": 0.1}),
        (adamw(lr=0.1, amsgrad=True), {}),
    ):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Tower())
        state = step_hook(ddp, given, **options)
        assert state.chain.executor == "auto"
        assert state.param_groups[0]["lr"] == 0.1
        assert state.explain() == TorchOptimizer(ddp.parameters(), state.chain).explain()
        ddp(torch.ones(2, WIDTH), 0, 0).sum().backward()
        made.append([param.detach() for param in ddp.parameters()])
    for one in made[1:]:
        assert all(map(torch.equal, one, made[0]))


def test_refused() -> None:
    ddp = DistributedDataParallel(Tower())
    params = dict(ddp.module.named_parameters())
    half = dict(list(params.items())[:3])
    wider = {name: torch.ones(3, 2) for name in params}
    twice = {**params, "again": params["layers.0.bias"]}

    def made(optimizer: Any = sgd(), module: Any = ddp, **options: Any) -> Callable[[], object]:  # noqa: B008
        return lambda: OptimizerState(optimizer, module, **options)

    attempts: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
        "no DDP": (made(module=ddp.module), TypeError, "takes the DistributedDataParallel.* Tower"),
        "no state": (made(state={}), TypeError, "state must be the State"),
        "half a state": (
            made(state=sgd().init(half)),
            ValueError,
            r"no state at 'layers\.1\.bias'",
        ),
        "another shape": (
            made(adamw(), state=adamw().init(wider)),
            ValueError,
            r"state at 'layers\.0\.bias' is of another tree",
        ),
        "another optimizer": (
            made(adamw(), state=sgd().init(params)),
            ValueError,
            r"state at 'layers\.0\.bias' is of another optimizer",
        ),
        "another option": (
            made(sgd(momentum=0.9), state=sgd().init(params)),
            ValueError,
            "momentum_buffer is missing",
        ),
        "twice": (made(params=twice), ValueError, r"'again' is also at 'layers\.0\.bias'"),
        "no params": (made(params={}), ValueError, "no tensor"),
        "no tensor": (made(params={"x": 1.0}), TypeError, "the parameter at 'x' must be a tensor"),
        "a class of its own": (
            made(Alone),
            TypeError,
            "Alone.* has no functional equiv",
        ),
        "an unknown option": (made(torch.optim.SGD, lrr=0.1), TypeError, "lrr"),
        "a wrong option": (made(torch.optim.SGD, lr=-1.0), ValueError, "learning rate"),
        "no optimizer": (made(3), TypeError, "must be a class of torch.optim, or an optimizer"),
        "executor": (made(executor="fast"), ValueError, "executor must be one of .* got 'fast'"),
    }
    for name, (attempt, error, text) in attempts.items():
        with case(refused=name), pytest.raises(error, match=text):
            attempt()


def test_a_frozen_parameter_in_params_is_named() -> None:
    module = Tower()
    module.layers[1].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    with pytest.raises(ValueError, match=r"'layers\.1\.weight' does not require gradients"):
        OptimizerState(sgd(), ddp, params=dict(module.named_parameters()))


def test_hyper_parameters_that_are_refused_change_nothing() -> None:
    state = OptimizerState(adamw(lr=0.1), DistributedDataParallel(Tower()))
    state.step_some(list(state.params), [torch.ones_like(one) for one in state.params.values()])
    wrong: dict[str, tuple[type[Exception], str]] = {
        "beta": (TypeError, "no hyper-parameter 'beta'"),
        "lr": (ValueError, "lr must be .* got -1.0"),
        "amsgrad": (ValueError, "max_exp_avg_sq"),  # the state has no such field
    }
    for name, (error, text) in wrong.items():
        with case(hyper=name), pytest.raises(error, match=text):
            state.set_hyper(**{name: -1.0 if name == "lr" else True})
        for hyper in (state.chain.hyper, state.param_groups[0]):
            assert (hyper["lr"], hyper["amsgrad"]) == (0.1, False)


def test_momentum_that_is_turned_on_later_begins_then_as_in_torch() -> None:
    state = OptimizerState(sgd(lr=0.1), DistributedDataParallel(Tower()))
    twins = [nn.Parameter(one.detach().clone()) for one in state.params.values()]
    plain = torch.optim.SGD(twins, lr=0.1, foreach=False)
    for step in range(5):
        if step == 2:
            state.set_hyper(momentum=0.9)
            plain.param_groups[0]["momentum"] = 0.9
        for twin in twins:
            twin.grad = torch.full_like(twin, 0.5 + step)
        state.step_some(list(state.params), [one.grad for one in twins if one.grad is not None])
        plain.step()
        assert all(map(torch.equal, state.params.values(), twins))


def test_state_begins_with_the_parameter_of_the_first_step() -> None:
    """A module can be loaded after the hook is made, also if state is made of parameters."""
    ddp = DistributedDataParallel(Tower())
    optimizer = schedule_free_sgd(lr=0.1)
    given = optimizer.init({name: one.clone() for name, one in ddp.module.named_parameters()})
    hooked = OptimizerState(optimizer, ddp)
    with torch.no_grad():
        for param in ddp.parameters():
            param.fill_(3.0)
    params: Any = {name: one.detach().clone() for name, one in hooked.params.items()}
    grads = {name: torch.full_like(one, 0.5) for name, one in params.items()}
    own = optimizer.init(params)
    for _ in range(3):
        hooked.step_some(list(grads), list(grads.values()))
        params, own = optimizer.update(params, grads, own)
    assert all(torch.equal(hooked.params[name], one) for name, one in params.items())
    # A given state that differs from the initial parameters was stepped, so its count must not be
    # 0.
    with pytest.raises(ValueError, match="its step count is 0"):
        OptimizerState(optimizer, ddp, state=given)
