"""Pure steps that were planned before: dicts, tangents, populations, tracers and derivatives."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from functional_optim import (
    Optimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    schedule_free_adamw,
    sgd,
)
from functional_optim.plan import tree_steps
from tests.composition.trees import grads_at, params_of
from tests.tensors import assert_same, normal

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "clipped": lambda: chain(clip_by_global_norm(0.1), adamw(0.1)),
    "schedule-free": schedule_free_adamw,
    "accumulate": lambda: chain(accumulate(3), clip_by_global_norm(0.5), adamw(0.01)),
}


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(with_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    monkeypatch.setattr(tree_steps, "_PLANS", [])


def test_what_comes_out_is_of_the_kind_that_went_in() -> None:
    """The result has the dict type of its input, even when that type changes between steps."""
    optimizer = adamw(0.1).using(executor="auto")
    params: dict[str, Any] = {"a": {"w": torch.ones(3), "b": torch.ones(2)}}
    for kind in (dict, OrderedDict, dict):
        params["a"] = kind(params["a"])
        grads, state = {"a": kind(params["a"])}, optimizer.init(params)
        for _ in range(4):
            made, after = optimizer.update(params, grads, state)
            assert type(made["a"]) is kind
            assert type(after.leaves["a"]) is kind


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch calls it
def test_a_tangent_goes_through_a_step_that_was_planned() -> None:
    """The kernels of a planned step compute no tangents, so dual tensors take another path."""
    found = []
    for executor in ("reference", "auto"):
        optimizer = adamw(0.1).using(executor=executor)
        params, grads = (
            {"w": normal(7, seed=0), "b": normal(3, seed=1)},
            {"w": normal(7, seed=2), "b": normal(3, seed=3)},
        )
        state = optimizer.init(params)
        for _ in range(4):
            optimizer.update(params, grads, state)
        with forward_ad.dual_level():
            dual = {
                key: forward_ad.make_dual(one, torch.ones_like(one)) for key, one in grads.items()
            }
            made, _ = optimizer.update(params, dual, state)
            found.append([forward_ad.unpack_dual(one).tangent for one in made.values()])
    assert None not in found[0]
    assert_same(*found)


def test_a_derivative_is_not_lost() -> None:
    """A step keeps the derivatives by gradients, learning rates, and tensors in a schedule."""
    lr = torch.tensor(0.1, requires_grad=True)
    params, grads = params_of(), grads_at(0)
    for optimizer in (
        chain(clip_by_global_norm(0.1), sgd(lr)),
        chain(clip_by_global_norm(0.1), sgd(lambda made: lr / (1 + made))),
        chain(clip_by_global_norm(0.1), sgd(0.1)).override(("scale",), lr=lr),
    ):
        found = []
        for one in (optimizer.using(executor="auto"), optimizer.using(executor="reference")):
            state = one.init(params)
            with torch.no_grad():
                for _ in range(4):
                    one.update(params, grads, state)
            made, _ = one.update(params, grads, state)
            (slope,) = torch.autograd.grad(sum(value.sum() for value in made.values()), [lr])
            asked = {key: value.clone().requires_grad_() for key, value in grads.items()}
            made, _ = one.update(params, asked, state)
            total = sum(value.sum() for value in made.values())
            found.append([slope, *torch.autograd.grad(total, list(asked.values()))])
        assert_same(*found)


@pytest.mark.parametrize("optimizer", [adamw(0.1), chain(clip_by_global_norm(0.1), adamw(0.1))])
def test_a_tracer_that_is_shown_operations_is_refused_as_before(optimizer: Optimizer) -> None:
    """make_fx must not see our loops: its trace would lack the step or fix its numbers."""
    auto, params, grads = optimizer.using(executor="auto"), params_of(), grads_at(0)
    state = auto.init(params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
            make_fx(lambda *of: auto.update(*of))(params, grads, state)  # noqa: PLW0108  counted
        for _ in range(4):
            auto.update(params, grads, state)  # so that a plan exists


@pytest.mark.parametrize("name", ["clipped", "schedule-free", "accumulate"])
def test_a_population_of_learning_rates_is_stepped(name: str) -> None:
    """Under no_grad, vmap works over a learning rate and over a tensor in a schedule."""
    rates, params, grads = torch.tensor([0.1, 0.2, 0.3]), params_of(), grads_at(3)
    found = []
    for executor in ("auto", "reference"):
        optimizer = CHAINS[name]().using(executor=executor)
        state = optimizer.init(params)
        for step in range(3):
            optimizer.update(params, grads_at(step), state)  # so that a plan exists

        def given(lr: Any, own: Optimizer = optimizer, state: Any = state) -> Any:
            return own.update(params, grads, state, lr=lr)

        def scheduled(lr: Any, own: Optimizer = optimizer, state: Any = state) -> Any:
            return own.replace(lr=lambda made: lr / (1 + made)).update(params, grads, state)

        with torch.no_grad():
            found.append([torch.func.vmap(one)(rates) for one in (given, scheduled)])
    assert_same(*found)
