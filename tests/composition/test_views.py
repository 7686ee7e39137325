"""Views such as averages, inputs beside the gradient, and schedules on the global step."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Rule,
    TorchOptimizer,
    adamw,
    chain,
    ema,
    lookahead,
    on_global_step,
    partition,
    schedule_free_sgd,
    sgd,
    swa,
)
from functional_optim.numeric import add
from functional_optim.schedules import linear

from ..choices import each
from ..tensors import assert_same
from .trees import COMPOSED, SHAPES, STEPS, grads_at, kind, params_of, run_of


def test_an_average_is_the_sum_of_what_parameters_were() -> None:
    params, state = run_of(chain(sgd(0.1), ema(0.75)))
    average: Any = {name: one.double() for name, one in params_of().items()}
    plain: Any = params_of()
    own = sgd(0.1).init(plain)
    for step in range(STEPS):
        plain, own = sgd(0.1).update(plain, grads_at(step), own)
        average = {n: 0.75 * average[n] + 0.25 * plain[n].double() for n in plain}
    assert_same(params, plain)
    seen = chain(sgd(0.1), ema(0.75)).view(params, state)
    for name, one in seen.items():
        torch.testing.assert_close(one, average[name].float())


def test_lookahead_goes_on_from_the_slow_parameters() -> None:
    """Lookahead matches its algorithm, written out in the test."""
    optimizer = chain(sgd(0.1, momentum=0.9), lookahead(3, alpha=0.5))
    params, state = run_of(optimizer)
    fast: Any = params_of()
    slow = dict(fast)
    rule = sgd(0.1, momentum=0.9)
    own = rule.init(fast)
    for step in range(STEPS):
        fast, own = rule.update(fast, grads_at(step), own)
        if (step + 1) % 3 == 0:
            slow = {name: torch.lerp(slow[name], fast[name], 0.5) for name in fast}
            fast = dict(slow)
    assert_same(params, fast)
    assert_same(optimizer.view(params, state), slow)


def test_a_view_is_no_mode() -> None:
    optimizer, params = chain(adamw(0.1), ema(0.5)), params_of()
    state = optimizer.init(params)
    for step in range(3):
        optimizer.view(params, state)
        params, state = optimizer.update(params, grads_at(step), state)
    assert_same((params, state), run_of(chain(adamw(0.1), ema(0.5)), 3))


def test_of_parts_each_leaf_has_its_own_view() -> None:
    optimizer = partition({"matrices": chain(sgd(0.1), ema(0.5)), "rest": sgd(0.1)}, kind)
    params, state = run_of(optimizer)
    seen = optimizer.view(params, state)
    assert_same(seen["scale"], params["scale"])
    assert not torch.equal(seen["body.weight"], params["body.weight"])


AVERAGES: dict[str, Any] = {
    "ema": ema(0.5),
    "slow ema": ema(0.9),
    "swa": swa(2),
    "lookahead": lookahead(2, alpha=0.5),
}


@each(first=["schedule_free", *AVERAGES], last=["ema", "slow ema", "swa"])
def test_the_last_stage_that_has_a_view_gives_it(first: str, last: str) -> None:
    """The last stage with a view gives the view: an average of the parameters that it gets."""
    rules = [schedule_free_sgd(lr=0.1)] if first == "schedule_free" else [sgd(0.1), AVERAGES[first]]
    before, both = chain(*rules), chain(*rules, AVERAGES[last])
    alone = chain(sgd(lr=0.0), AVERAGES[last])
    params, state = params_of(), both.init(params_of())
    trained, own = params_of(), before.init(params_of())
    given, kept = params_of(), alone.init(params_of())
    for step in range(STEPS):
        params, state = both.update(params, grads_at(step), state)
        trained, own = before.update(trained, grads_at(step), own)
        given, kept = alone.update(trained, grads_at(step), kept)
    assert_same(both.view(params, state), alone.view(given, kept))


class PolyakHyper(NamedTuple):
    lr: float


class PolyakShared(NamedTuple):
    size: float  # loss / sum of squares


class PolyakCoefficients(NamedTuple):
    size: float


def polyak_reduce(param: Tensor, grad: Tensor, state: NoState, c: Any) -> tuple[Tensor]:
    return (grad.double().square().sum(),)


def polyak_combine(
    shared: PolyakShared, totals: tuple[float], hyper: PolyakHyper, *, loss: float
) -> PolyakShared:
    return PolyakShared(hyper.lr * float(loss) / totals[0])


def polyak_coefficients(step: float, hyper: Any, shared: PolyakShared) -> PolyakCoefficients:
    return PolyakCoefficients(shared.size)


def polyak_rule(
    param: Tensor, grad: Tensor, state: NoState, c: PolyakCoefficients
) -> tuple[Tensor, NoState]:
    return add(param, grad, -c.size), state


POLYAK = Rule(
    name="polyak",
    hyper=PolyakHyper,
    rule=polyak_rule,
    coefficients=polyak_coefficients,
    shared=PolyakShared,
    init_shared=lambda hyper: PolyakShared(0.0),
    reduce=polyak_reduce,
    totals=1,
    combine=polyak_combine,
    extra=("loss",),
)
"""Polyak's step size, which takes the loss as an input."""


def test_an_input_beside_the_gradient_reaches_the_stage_that_declares_it() -> None:
    optimizer = partition({"matrices": sgd(0.0), "rest": chain(ema(0.5), POLYAK(lr=1.0))}, kind)
    params: Any = params_of()
    grads = grads_at(0)
    new, _ = optimizer.update(
        params, grads, optimizer.init(params), extra={"loss": torch.tensor(3.0)}
    )
    squares = sum(grads[name].double().square().sum().item() for name in ("body.bias", "scale"))
    torch.testing.assert_close(new["scale"], params["scale"] - 3.0 / squares * grads["scale"])


def test_an_input_that_is_missing_or_unknown_is_refused() -> None:
    optimizer, params = chain(POLYAK(lr=1.0)), params_of()
    state = optimizer.init(params)
    with pytest.raises(TypeError, match=r"polyak needs 'loss' .*extra="):
        optimizer.update(params, grads_at(0), state)
    with pytest.raises(TypeError, match=r"no stage takes the input 'loose'; .*'loss'"):
        optimizer.update(params, grads_at(0), state, extra={"loss": 1.0, "loose": 2.0})
    with pytest.raises(TypeError, match="no stage takes the input 'loss'"):
        sgd().update(params, grads_at(0), sgd().init(params), extra={"loss": 1.0})


def test_a_global_schedule_goes_on_for_a_leaf_that_misses_steps() -> None:
    schedule = linear(1.0, to=0.0, steps=8)
    moved = {}
    for marked in (False, True):
        optimizer = sgd(on_global_step(schedule) if marked else schedule)
        params: Any = {"a": torch.zeros(1), "b": torch.zeros(1)}
        state = optimizer.init(params)
        for step in range(4):
            b = torch.ones(1) if step == 3 else None
            params, state = optimizer.update(params, {"a": torch.ones(1), "b": b}, state)
        moved[marked] = -params["b"].item()
    assert moved == {False: 1.0, True: 0.625}


def test_a_global_schedule_of_an_override_counts_all_steps() -> None:
    """This holds for trees and for groups, if the parameter misses steps."""
    schedule = on_global_step(linear(1.0, to=0.0, steps=8))
    optimizer = sgd(0.0).override(("a",), lr=schedule)
    params: Any = {"a": torch.zeros(1), "b": torch.zeros(1)}
    owned = {name: torch.nn.Parameter(one.clone()) for name, one in params.items()}
    state, trainer = optimizer.init(params), TorchOptimizer(owned.items(), optimizer)
    for step in range(4):
        grads = {"a": torch.ones(1) if step in (1, 3) else None, "b": torch.ones(1)}
        params, state = optimizer.update(params, grads, state)
        for name, param in owned.items():
            param.grad = grads[name]
        trainer.step()
    assert params["a"].item() == owned["a"].item() == -(0.875 + 0.625)


def test_a_global_schedule_needs_an_optimizer_that_counts_steps() -> None:
    """A group and a bound optimizer refuse the schedule, and change nothing."""
    lr, weight = on_global_step(linear(1.0, to=0.0, steps=8)), torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    trainer = TorchOptimizer([{"params": [weight], "lr": lr}], sgd(0.5))
    with pytest.raises(ValueError, match=r"sgd: lr is on_global_step\(.*does not count its steps"):
        trainer.step()
    assert weight.item() == 1.0
    bound = sgd(0.5).bind({"a": torch.ones(1)})
    bound.gradients["a"].fill_(1.0)
    bound.set_hyper(lr=lr)
    with pytest.raises(ValueError, match="does not count its steps"):
        bound.step(bound.gradients)
    assert bound.params["a"].item() == 1.0


def test_every_composed_state_says_where_each_tensor_is() -> None:
    """``state_field`` returns a composed state by name, and ``with_state_field`` restores it.

    The field is None for leaves whose stages do not have it.
    """
    from functional_optim import state_field, with_state_field

    optimizer, params = COMPOSED["clip over parts"](), params_of()
    state = run_of(optimizer)[1]
    field = state_field(optimizer, state, "exp_avg", params=params)
    assert {name for name, one in field.items() if one is not None} == {"body.bias", "scale"}
    again = with_state_field(optimizer, state, "exp_avg", field, params=params)
    assert_same(again, state)
    assert set(SHAPES) == set(field)
    with pytest.raises(TypeError, match="give params="):
        state_field(optimizer, state, "exp_avg")
