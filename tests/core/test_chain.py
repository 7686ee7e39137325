"""chain(): stages run in order, lr is handed down, ascent leads, what is no chain is refused."""

from typing import Any, NamedTuple

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

from .support import CHAINS, VARIANTS, assert_same, noise, steps


def _step(optimizer: Optimizer, param: Any, grad: Any) -> Any:
    return optimizer.update(param, grad, optimizer.init(param))[0]


def test_the_gradient_runs_through_the_stages_in_order() -> None:
    param, grad = torch.tensor([10.0]), torch.tensor([5.0])
    clip_last = chain(weight_decay(0.1), clip_by_value(1.0), sgd(1.0))
    clip_first = chain(clip_by_value(1.0), weight_decay(0.1), sgd(1.0))
    assert _step(clip_last, param, grad).item() == 9.0  # min(5 + 1, 1)
    assert _step(clip_first, param, grad).item() == 8.0  # min(5, 1) + 1


def test_a_rule_before_a_rule_moves_the_parameter_first() -> None:
    """Weight decay after a decoupled one sees the shrunk parameter."""
    chained = chain(decoupled_weight_decay(0.5), weight_decay(1.0), sgd(1.0))
    assert _step(chained, torch.tensor([4.0]), torch.tensor([1.0])).item() == 2.0 - (1.0 + 2.0)


def test_an_optimizer_at_the_end_is_taken_apart() -> None:
    nested = chain(clip_by_value(1.0), chain(weight_decay(0.1), adam(0.2)))
    links = chain(clip_by_value(1.0), weight_decay(0.1), *adam(0.2).links)
    assert nested == links
    assert chain(adam(0.2)) == adam(0.2)
    assert chain(*adam(0.2).links) == adam(0.2)


def test_adamw_is_adam_behind_a_decoupled_decay() -> None:
    params = noise(0, 5)
    by_hand = chain(decoupled_weight_decay(0.3), adam(0.1))
    for twin in (
        adamw(0.1, weight_decay=0.3),
        adam(0.1, weight_decay=0.3, decoupled_weight_decay=True),
    ):
        (new, state), (wanted, other) = (
            steps(one, params, lambda index: noise(index + 1, 5)) for one in (twin, by_hand)
        )
        assert_same(new, wanted)
        assert_same(state.leaves.stages[-1], other.leaves.stages[-1])
    assert not torch.equal(wanted, steps(adam(0.1), params, lambda i: noise(i + 1, 5))[0])


class TestLearningRate:
    def test_it_is_taken_from_the_rule_at_the_end(self) -> None:
        optimizer = chain(decoupled_weight_decay(0.5), sgd(0.25))
        assert optimizer.links[1].hyper.lr == 0.25
        assert _step(optimizer, torch.ones(1), torch.zeros(1)).item() == 1 - 0.25 * 0.5

    def test_it_follows_replace_and_update_and_override(self) -> None:
        optimizer = chain(decoupled_weight_decay(0.5), sgd(0.25))
        for changed in (optimizer.replace(lr=1.0), optimizer.override((), lr=1.0)):
            assert _step(changed, torch.ones(1), torch.zeros(1)).item() == 0.5
        param = torch.ones(1)
        new, _ = optimizer.update(param, torch.zeros(1), optimizer.init(param), lr=1.0)
        assert new.item() == 0.5

    def test_a_rule_in_the_middle_inherits_too(self) -> None:
        middle = sgd().links[-1].stage(momentum=0.0, dampening=0.0, nesterov=False)
        optimizer = chain(middle, sgd(0.25))
        assert optimizer.links[1].hyper.lr == 0.25
        assert _step(optimizer, torch.ones(1), torch.ones(1)).item() == 0.5

    def test_a_rule_of_its_own_lr_keeps_it_until_lr_is_set(self) -> None:
        optimizer = chain(sgd(0.5).links[-1], sgd(0.25))
        assert _step(optimizer, torch.ones(1), torch.ones(1)).item() == 0.25
        assert _step(optimizer.replace(lr=0.1), torch.ones(1), torch.ones(1)).item() == (
            pytest.approx(0.8)
        )

    def test_without_one_at_the_end_the_error_says_so(self) -> None:
        rule = Rule(name="still", hyper=StillHyper, rule=still_rule)
        with pytest.raises(
            TypeError, match=r"decoupled_weight_decay takes its lr .* still has none"
        ):
            chain(decoupled_weight_decay(0.5), rule(rate=1.0))
        with pytest.raises(TypeError, match="lr"):
            chain(clip_by_value(1.0), decoupled_weight_decay(0.5))


class StillHyper(NamedTuple):
    rate: float


def still_rule(
    param: Tensor, grad: Tensor, state: NoState, c: StillHyper
) -> tuple[Tensor, NoState]:
    return param - c.rate * grad, state


class TestMaximize:
    """Ascent of f is descent of -f: every stage sees the negated gradient, decays included."""

    @pytest.mark.parametrize("name", {**VARIANTS, **CHAINS})
    def test_ascending_equals_descending_the_negative(self, name: str) -> None:
        optimizer = {**VARIANTS, **CHAINS}[name]
        up, down = optimizer.replace(maximize=True), optimizer.replace(maximize=False)
        assert_same(
            steps(up, noise(0, 4), lambda index: noise(index + 1, 4)),
            steps(down, noise(0, 4), lambda index: -noise(index + 1, 4)),
        )

    def test_it_leads_whatever_stands_before_it(self) -> None:
        param, grad = torch.tensor([10.0]), torch.tensor([5.0])
        optimizer = chain(weight_decay(0.1), sgd(1.0, maximize=True))
        assert _step(optimizer, param, grad).item() == 10.0 - (-5.0 + 1.0)
        assert optimizer.stages[0].name == "maximize"
        clipped = chain(clip_by_value(1.0), weight_decay(0.1), sgd(1.0, maximize=True))
        assert _step(clipped, param, grad).item() == 10.0 - (-1.0 + 1.0)

    def test_decays_shrink_also_when_ascending(self) -> None:
        zero = torch.zeros(1)
        for optimizer in (
            adamw(0.1, weight_decay=0.5, maximize=True),
            lion(0.1, weight_decay=0.5, maximize=True),
            qhm(0.1, weight_decay=0.5, weight_decay_type="direct", maximize=True),
            sgd(0.1, weight_decay=0.5, maximize=True),
        ):
            assert _step(optimizer, torch.ones(1), zero).item() == pytest.approx(0.95)

    def test_as_a_link_it_turns_a_rule_around(self) -> None:
        optimizer = chain(clip_by_value(0.5), maximized(), sgd(1.0).links[-1])
        assert _step(optimizer, torch.zeros(1), torch.ones(1)).item() == 0.5
        assert optimizer.stages[0].name == "maximize"

    def test_given_twice_it_is_refused(self) -> None:
        with pytest.raises(ValueError, match="maximize is given twice"):
            chain(maximized(), maximized(), sgd().links[-1])


class TestRefused:
    @pytest.mark.parametrize(
        "parts", [(), (clip_by_value(1.0),), (weight_decay(0.1), clip_by_global_norm(1.0))]
    )
    def test_a_chain_ends_with_a_rule(self, parts: tuple[Any, ...]) -> None:
        last = parts[-1].stage.name if parts else "nothing"
        with pytest.raises(TypeError, match=f"ends with a rule .* got {last}"):
            chain(*parts)

    def test_an_optimizer_stands_last_or_not_at_all(self) -> None:
        with pytest.raises(TypeError, match="place 0"):
            chain(sgd(), clip_by_value(1.0))
        with pytest.raises(TypeError, match="place 1"):
            chain(clip_by_value(1.0), sgd(), adam())

    @pytest.mark.parametrize(
        "part", [1.0, None, "sgd", sgd, clip_by_value, sgd().stages[-1], torch.optim.SGD]
    )
    @pytest.mark.parametrize("last", [False, True])
    def test_other_things_are_no_links(self, part: Any, last: bool) -> None:
        with pytest.raises(TypeError, match="chain takes links"):
            chain(*((sgd().links[-1], part) if last else (part, sgd())))

    def test_stages_refuse_unknown_and_missing_names(self) -> None:
        stage = sgd().stages[-1]
        with pytest.raises(TypeError, match="sgd has no hyper-parameter 'beta'; it has lr, mom"):
            stage(lr=0.1, beta=0.9)
        with pytest.raises(TypeError, match="sgd needs a value for dampening, nesterov"):
            stage(lr=0.1, momentum=0.9)
