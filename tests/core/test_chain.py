"""``chain()``: order of stages, shared lr, ascent, and refused chains."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    DistributedOptimizer,
    NoState,
    Optimizer,
    Rule,
    TorchOptimizer,
    accumulate,
    adam,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    descend,
    ema,
    freeze,
    lion,
    lookahead,
    masked,
    maximized,
    partition,
    qhm,
    sam,
    sgd,
    trace,
    weight_decay,
)
from tests.choices import case, each_value, one_in

from .support import EVERY, assert_same, noise, step, steps

ZERO, ONE = torch.zeros(1), torch.ones(1)


class StillHyper(NamedTuple):
    rate: float


def still_rule(
    param: Tensor, grad: Tensor, state: NoState, c: StillHyper
) -> tuple[Tensor, NoState]:
    return param - c.rate * grad, state


def test_stages_run_in_order() -> None:
    """A rule at the front moves the parameter first, so a later decay reads the moved parameter."""
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


PARAMS = {"a": noise(0, 4), "b": noise(1, 2, 3)}


def torchs(*made: Callable[[list[Tensor]], Callable[[], object]]) -> list[Tensor]:
    """Return the parameters after four steps, in each of which several functions step in turn."""
    params = [nn.Parameter(one.clone()) for one in PARAMS.values()]
    stepping = [make(params) for make in made]
    for step_ in range(4):
        for place, param in enumerate(params):
            param.grad = noise(10 * step_ + place, *param.shape)
        for one in stepping:
            one()
    return [param.detach() for param in params]


def sgd_of(lr: float, **options: Any) -> Callable[[list[Tensor]], Callable[[], object]]:
    return lambda params: torch.optim.SGD(params, lr=lr, foreach=False, **options).step


def adamw_of(lr: float) -> Callable[[list[Tensor]], Callable[[], object]]:
    return lambda params: torch.optim.AdamW(params, lr=lr, foreach=False).step


def clipped(params: list[Tensor]) -> Callable[[], object]:
    def clip() -> None:
        for param in params:
            assert param.grad is not None
            param.grad.clamp_(-0.5, 0.5)

    return clip


BEHIND_A_RULE: dict[str, tuple[Optimizer, list[Any]]] = {
    "a clip between": (
        chain(adamw(0.1), clip_by_value(0.5), sgd(0.2)), [adamw_of(0.1), clipped, sgd_of(0.2)]
    ),
    "two rules": (
        chain(sgd(0.1, momentum=0.9), sgd(0.2, momentum=0.5, nesterov=True)),
        [sgd_of(0.1, momentum=0.9), sgd_of(0.2, momentum=0.5, nesterov=True)],
    ),
    "two rules of one lr": (
        chain(sgd(0.1, momentum=0.9), sgd(0.1)), [sgd_of(0.1, momentum=0.9), sgd_of(0.1)]
    ),
    "parts with two rules": (
        partition(
            {"all": chain(sgd(0.1), sgd(0.2), sgd(0.1, momentum=0.5))}, lambda path, shape: "all"
        ),
        [sgd_of(0.1), sgd_of(0.2), sgd_of(0.1, momentum=0.5)],
    ),
}  # fmt: skip


def stepped(make: Callable[[dict[str, Any]], Any], params: dict[str, Any]) -> list[Tensor]:
    """Return the parameters after the same four steps by a front-end."""
    step_ = make(params)
    for number in range(4):
        step_(
            {
                name: noise(10 * number + place, *param.shape)
                for place, (name, param) in enumerate(params.items())
            }
        )
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("name", BEHIND_A_RULE)
def test_what_stands_behind_a_rule_sees_the_gradient_as_the_stages_before_have_left_it(
    name: str,
) -> None:
    """A chain steps as torch's classes do one after the other, with each front-end."""
    optimizer, made = BEHIND_A_RULE[name]
    want = torchs(*made)

    def in_place(params: dict[str, Any]) -> Any:
        state = optimizer.init(params)
        return lambda grads: optimizer.update_(params, grads, state)

    def as_torch(params: dict[str, Any]) -> Any:
        made = TorchOptimizer(params.items(), optimizer)

        def step_(grads: dict[str, Any]) -> None:
            for key, param in params.items():
                param.grad = grads[key]
            made.step()

        return step_

    def on_workers(params: dict[str, Any]) -> Any:
        return DistributedOptimizer.over_threads(optimizer, params, dict.fromkeys(params, "a")).step

    for way in (in_place, as_torch, on_workers):
        params = {key: nn.Parameter(one.clone()) for key, one in PARAMS.items()}
        if way is in_place:
            params = {key: one.detach() for key, one in params.items()}
        with case(way=way.__name__):
            for got, wanted in zip(stepped(way, params), want, strict=True):
                assert_same(got, wanted)


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

    def test_an_lr_of_its_own_has_a_name_until_lr_is_set(self) -> None:
        optimizer = chain(sgd(0.5).links[-1], sgd(0.25))
        assert (optimizer.hyper["lr"], optimizer.hyper["sgd.lr"]) == (0.25, 0.5)
        assert optimizer.replace(**optimizer.hyper) == optimizer
        changed = optimizer.replace(**{"sgd.lr": 0.1})
        assert (changed.hyper["lr"], changed.hyper["sgd.lr"]) == (0.25, 0.1)
        assert "sgd.lr" not in optimizer.replace(lr=0.1).hyper
        assert "sgd.lr" not in changed.replace(**{"sgd.lr": 0.25}).hyper

    def test_without_one_at_the_end_the_error_says_so(self) -> None:
        rule = Rule(name="still", hyper=StillHyper, rule=still_rule)
        with pytest.raises(TypeError, match=r"decoupled_weight_decay takes its lr .* none has one"):
            chain(decoupled_weight_decay(0.5), rule(rate=1.0))


class TestMaximize:
    """Ascent of f as descent of -f: all stages, including decays, see the negated gradient."""

    @each_value(optimizer=dict(one_in(4, EVERY.items())))
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


IDLE: list[tuple[Callable[[], Optimizer], str]] = [
    (lambda: chain(sgd(lr=1.0), clip_by_global_norm(1e-9)), "clip_by_global_norm.*before sgd"),
    (lambda: chain(adamw(), weight_decay(0.1)), "weight_decay changes the gradient"),
    (lambda: chain(sgd(), clip_by_value(1.0), ema(0.9)), "clip_by_value.*no effect"),
    (lambda: chain(sgd(), trace(0.9), lookahead()), "trace.*no effect"),
    (lambda: chain(labelled(), clip_by_value(1.0)), "clip_by_value.*no effect"),
    (lambda: masked(chain(sgd(), clip_by_value(1.0)), ("a",)), "clip_by_value.*no effect"),
    (lambda: chain(sgd(), accumulate(2)), "accumulate decides.*before sgd"),
    (lambda: chain(sgd(), apply_if_finite(2)), "apply_if_finite decides.*before sgd"),
    (lambda: chain(sgd(), sam()), "sam decides.*before sgd"),
]


def labelled() -> Optimizer:
    return partition({"all": sgd()}, lambda path, shape: "all")


@each_value(idle=IDLE)
def test_a_stage_without_effect_is_refused(idle: tuple[Callable[[], Optimizer], str]) -> None:
    """Fault 6: a transform whose result no stage reads, or a gate without a rule, is an error."""
    make, why = idle
    with pytest.raises(ValueError, match=why):
        make()


def test_a_stage_with_an_effect_is_taken_behind_a_rule() -> None:
    """Fault 6: averages, decays, gates of averages, and leading stages have an effect."""
    for part in (ema(0.9), lookahead(), decoupled_weight_decay(0.1), maximized(), freeze(("a",))):
        with case(part=part):
            assert len(chain(sgd(), part).links) == 4
    assert len(chain(sgd(), accumulate(2), ema(0.9)).links) == 5
    assert len(chain(sgd(), clip_by_value(1.0), descend(0.1)).links) == 5


def test_every_parameter_has_a_rule_that_reads_its_gradient() -> None:
    """Fault 6: an average or a decay alone does not step by the gradient."""
    for alone in (ema(0.9), lookahead()):
        with case(alone=alone), pytest.raises(TypeError, match="rule that steps by the gradient"):
            chain(alone)
    params = {"a": ONE, "b": ZERO}
    for part in (ema(0.9), lookahead(), decoupled_weight_decay(0.1)):
        optimizer = chain(masked(sgd(0.1), ("a",)), *chain(part, sgd(0.1)).links[:1])
        with case(part=part), pytest.raises(ValueError, match="no rule acts .* at 'b'"):
            optimizer.init(params)


def test_rules_that_read_no_gradient_are_declared_so() -> None:
    """Fault 6: the result does not depend on the gradient, even if the gradient is NaN."""
    for link in (ema(0.9), lookahead(), *chain(decoupled_weight_decay(0.1), sgd()).links[1:2]):
        with case(link=link):
            stage = link.stage
            assert isinstance(stage, Rule)
            assert not stage.uses_gradient
            state = stage.init(ONE, link.hyper)
            coefficients = stage.coefficients(1.0, link.hyper)
            made = [stage.rule(ONE, grad, state, coefficients) for grad in (ONE, ONE * math.nan)]
            assert_same(*made)
