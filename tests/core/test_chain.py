"""chain(): stages run in order, lr is handed down, ascent leads, what is no chain is refused."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    lion,
    maximized,
    qhm,
    sgd,
    weight_decay,
)
from tests.choices import each_value

from .support import EVERY, assert_same, noise, step, steps

ZERO, ONE = torch.zeros(1), torch.ones(1)


class StillHyper(NamedTuple):
    rate: float


def still_rule(
    param: Tensor, grad: Tensor, state: NoState, c: StillHyper
) -> tuple[Tensor, NoState]:
    return param - c.rate * grad, state


def test_stages_run_in_order() -> None:
    """A rule before a rule moves the parameter first: a decay behind it sees the shrunk one."""
    param, grad = torch.tensor([10.0]), torch.tensor([5.0])
    clip_last = chain(weight_decay(0.1), clip_by_value(1.0), sgd(1.0))
    clip_first = chain(clip_by_value(1.0), weight_decay(0.1), sgd(1.0))
    assert step(clip_last, param, grad).item() == 9.0  # min(5 + 1, 1)
    assert step(clip_first, param, grad).item() == 8.0  # min(5, 1) + 1
    decays = chain(decoupled_weight_decay(0.5), weight_decay(1.0), sgd(1.0))
    assert step(decays, torch.tensor([4.0]), ONE).item() == 2.0 - (1.0 + 2.0)


def test_an_optimizer_at_the_end_is_taken_apart() -> None:
    nested = chain(clip_by_value(1.0), chain(weight_decay(0.1), adam(0.2)))
    assert nested == chain(clip_by_value(1.0), weight_decay(0.1), *adam(0.2).links)
    assert chain(adam(0.2)) == chain(*adam(0.2).links) == adam(0.2)


def test_adamw_is_adam_behind_a_decoupled_decay() -> None:
    params, by_hand = noise(0, 5), chain(decoupled_weight_decay(0.3), adam(0.1))
    wanted, state = steps(by_hand, params, lambda index: noise(index + 1, 5))
    for twin in (
        adamw(0.1, weight_decay=0.3),
        adam(0.1, weight_decay=0.3, decoupled_weight_decay=True),
    ):
        new, own = steps(twin, params, lambda index: noise(index + 1, 5))
        assert_same(new, wanted)
        assert_same(own.leaves.stages[-1], state.leaves.stages[-1])
    assert not torch.equal(wanted, steps(adam(0.1), params, lambda i: noise(i + 1, 5))[0])


class TestLearningRate:
    def test_every_stage_without_one_takes_that_of_the_rule_at_the_end(self) -> None:
        optimizer = chain(decoupled_weight_decay(0.5), sgd(0.25))
        assert optimizer.links[1].hyper.lr == 0.25
        assert step(optimizer, ONE, ZERO).item() == 1 - 0.25 * 0.5
        for changed in (optimizer.replace(lr=1.0), optimizer.override((), lr=1.0)):
            assert step(changed, ONE, ZERO).item() == 0.5
        assert step(optimizer, ONE, ZERO, lr=1.0).item() == 0.5
        middle = sgd().links[-1].stage(momentum=0.0, dampening=0.0, nesterov=False)
        assert step(chain(middle, sgd(0.25)), ONE, ONE).item() == 0.5

    def test_a_rule_of_its_own_lr_keeps_it_until_lr_is_set(self) -> None:
        optimizer = chain(sgd(0.5).links[-1], sgd(0.25))
        assert step(optimizer, ONE, ONE).item() == 0.25
        assert step(optimizer.replace(lr=0.1), ONE, ONE).item() == pytest.approx(0.8)

    def test_without_one_at_the_end_the_error_says_so(self) -> None:
        rule = Rule(name="still", hyper=StillHyper, rule=still_rule)
        with pytest.raises(TypeError, match=r"decoupled_weight_decay takes its lr .* none has one"):
            chain(decoupled_weight_decay(0.5), rule(rate=1.0))


class TestMaximize:
    """Ascent of f is descent of -f: every stage sees the negated gradient, decays included."""

    @each_value(optimizer=EVERY)
    def test_ascending_equals_descending_the_negative(self, optimizer: Optimizer) -> None:
        up, down = optimizer.replace(maximize=True), optimizer.replace(maximize=False)
        assert_same(
            steps(up, noise(0, 4), lambda index: noise(index + 1, 4)),
            steps(down, noise(0, 4), lambda index: -noise(index + 1, 4)),
        )

    def test_it_leads_whatever_stands_before_it(self) -> None:
        param, grad = torch.tensor([10.0]), torch.tensor([5.0])
        optimizer = chain(weight_decay(0.1), sgd(1.0, maximize=True))
        assert step(optimizer, param, grad).item() == 10.0 - (-5.0 + 1.0)
        clipped = chain(clip_by_value(1.0), weight_decay(0.1), sgd(1.0, maximize=True))
        assert step(clipped, param, grad).item() == 10.0 - (-1.0 + 1.0)
        as_link = chain(clip_by_value(0.5), maximized(), sgd(1.0).links[-1])
        assert step(as_link, ZERO, ONE).item() == 0.5
        assert {one.stages[0].name for one in (optimizer, clipped, as_link)} == {"maximize"}
        with pytest.raises(ValueError, match="maximize is given twice"):
            chain(maximized(), maximized(), sgd().links[-1])

    def test_decays_shrink_also_when_ascending(self) -> None:
        for optimizer in (
            adamw(0.1, weight_decay=0.5, maximize=True),
            lion(0.1, weight_decay=0.5, maximize=True),
            qhm(0.1, weight_decay=0.5, weight_decay_type="direct", maximize=True),
            sgd(0.1, weight_decay=0.5, maximize=True),
        ):
            assert step(optimizer, ONE, ZERO).item() == pytest.approx(0.95)


def test_a_chain_has_a_rule() -> None:
    for parts in ((), (clip_by_value(1.0),), (weight_decay(0.1), clip_by_global_norm(1.0))):
        there = ", ".join(part.stage.name for part in parts) or "nothing"
        with pytest.raises(TypeError, match=f"needs a rule .* got {there}"):
            chain(*parts)
    with pytest.raises(TypeError, match="needs a rule"):
        chain(clip_by_value(1.0), maximized())
