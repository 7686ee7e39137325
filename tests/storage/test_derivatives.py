"""Stored state has no derivative: a request for one is refused, and not answered with zero."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from functional_optim import chain, clip_by_global_norm, labels, lbfgs, matching, partition, sgd
from functional_optim.storage import stored
from tests.tensors import normal

STORED = stored(sgd(lr=0.1, momentum=0.9), state="bfloat16")
PARTS = partition(
    {"stored": STORED, "rest": sgd(lr=0.1)},
    labels({"stored": matching("big")}, default="rest"),
)
PARAMS = {"big": normal(64), "small": normal(3, seed=1)}


def total(optimizer: Any, params: Any, factor: Any = 0.3, state: Any = None, **hyper: Any) -> Any:
    """Return the sum of all parameters after a step."""
    state = optimizer.init(params) if state is None else state
    grads = {name: factor * value.detach() + 1 for name, value in params.items()}
    made, _ = optimizer.update(params, grads, state, **hyper)
    return sum(one.sum() for one in made.values())


ASKED: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "lr": lambda one: lambda x: total(one, PARAMS, **dict.fromkeys(rates(one), x)),
    "gradients": lambda one: lambda x: total(one, PARAMS, x),
    "parameters": lambda one: lambda x: total(one, {**PARAMS, "big": PARAMS["big"] * x}),
}


def rates(optimizer: Any) -> list[str]:
    return [name for name in optimizer.hyper if name.split(".")[-1] == "lr"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("optimizer", [STORED, PARTS, chain(clip_by_global_norm(1.0), STORED)])
@pytest.mark.parametrize("asked", ASKED)
def test_a_derivative_is_refused(asked: str, optimizer: Any) -> None:
    function, at = ASKED[asked](optimizer), torch.tensor(0.5)
    with pytest.raises(RuntimeError, match=r"at 'big': stored_\w+ has no derivative"):
        torch.func.grad(function)(at)
    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.func.jvp(function, (at,), (torch.ones(()),))
    if asked != "parameters":
        with pytest.raises(RuntimeError, match="has no derivative"):
            function(at.clone().requires_grad_())


def test_where_none_is_asked_for_it_steps() -> None:
    """Steps work for parameters of a module, inside other transforms, and without autograd."""
    module = nn.ParameterDict({name: value.clone() for name, value in PARAMS.items()})
    want = total(STORED, PARAMS)
    assert torch.equal(total(STORED, dict(module.items())), want)
    at = torch.tensor(0.3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(total(STORED, PARAMS, at), want)

    def beside(x: Tensor) -> Any:
        return x * total(STORED, PARAMS).detach()

    assert torch.equal(torch.func.grad(beside)(torch.tensor(2.0)), want)
    stacked = {name: value.expand(2, *value.shape).clone() for name, value in PARAMS.items()}
    both = torch.vmap(lambda params: total(STORED, params))(stacked)
    torch.testing.assert_close(both, want.expand(2))
    # A part without stored state has a derivative, even beside a stored part.
    found = torch.func.grad(lambda lr: total(PARTS, PARAMS, **{"rest.lr": lr}))(torch.tensor(0.1))
    assert found.item() == pytest.approx(-float((0.3 * PARAMS["small"] + 1).sum()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_beside_a_population() -> None:
    """A dual level without tangents of the step is accepted; a tangent of an outer level is not."""
    stacked = {name: value.expand(2, *value.shape).clone() for name, value in PARAMS.items()}
    want = torch.vmap(lambda params: total(STORED, params))(stacked)
    with forward_ad.dual_level(), torch.no_grad():
        got = torch.vmap(lambda params: total(STORED, params))(stacked)
    assert torch.equal(got, want)
    both = torch.func.grad(ASKED["lr"](STORED))
    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.func.jvp(both, (torch.tensor(0.5),), (torch.ones(()),))


def test_totals_that_are_given_have_none_either() -> None:
    clipped = stored(chain(clip_by_global_norm(1.0), sgd(lr=0.1)), state="bfloat16")
    state = clipped.init(PARAMS)

    def by_total(x: Tensor) -> Any:
        made, _ = clipped.update(PARAMS, PARAMS, state, measured=[x])
        return made["big"].sum()

    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.func.grad(by_total)(torch.tensor(4.0, dtype=torch.float64))


def test_lbfgs_refuses_it_too() -> None:
    optimizer = lbfgs(lr=0.3, max_iter=2)

    def value_and_grad(params: Any) -> Any:
        return (params["w"] ** 2).sum(), {"w": 2 * params["w"]}

    def stepped(weight: Tensor, lr: Any = 0.3) -> Any:
        params = {"w": weight}
        state = optimizer.init({"w": weight.detach()})
        return optimizer.update(params, None, state, value_and_grad=value_and_grad, lr=lr)[0]["w"]

    weight = torch.ones(2, dtype=torch.float64)

    def by_closure(factor: Tensor) -> Any:
        def scaled(params: Any) -> Any:
            return factor * (params["w"] ** 2).sum(), {"w": 2 * factor * params["w"]}

        made = optimizer.update({"w": weight}, None, state, value_and_grad=scaled)
        return made[0]["w"].sum()

    def by_gradients(factor: Tensor) -> Any:
        given = value_and_grad({"w": weight})[1]["w"] * factor
        made = optimizer.update(
            {"w": weight}, {"w": given}, state, value_and_grad=value_and_grad, loss=2.0
        )
        return made[0]["w"].sum()

    state = optimizer.init({"w": weight})
    for function in (by_closure, by_gradients):
        with pytest.raises(RuntimeError, match="has no derivative"):
            torch.func.grad(function)(torch.tensor(1.0, dtype=torch.float64))
    rate: Any = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        lbfgs(lr=rate).update({"w": weight}, None, state, value_and_grad=value_and_grad)
    for argument in (0, 1):
        given = weight, torch.tensor(0.3, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="a step of lbfgs has no derivative"):
            torch.func.grad(lambda *given: stepped(*given).sum(), argnums=argument)(*given)
    assert torch.equal(stepped(nn.Parameter(weight)), stepped(weight))
