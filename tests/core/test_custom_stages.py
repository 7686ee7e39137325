"""Rules and transforms of a user's own: everything the built-in ones get, they get."""

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    adam,
    chain,
    clip_by_global_norm,
    decoupled_weight_decay,
    maximized,
)

from .stages import BALL, BUDGET, PACED, ROW, SIGN, SMOOTH, BallHyper, SignHyper
from .support import Frozen, assert_same, noise

CUSTOM: dict[str, Optimizer] = {
    "rule": chain(BALL(lr=0.1, decay=0.9, slow=False)),
    "rule with a list": chain(BALL(lr=0.1, decay=0.9, slow=True)),
    "transform": chain(SMOOTH(beta=0.9), adam(0.1)),
    "measured at the start": chain(BUDGET(budget=2.0), BALL(lr=0.1, decay=0.9, slow=True)),
    "measured in the middle": chain(
        SMOOTH(beta=0.5),
        decoupled_weight_decay(0.1),
        BUDGET(budget=2.0),
        clip_by_global_norm(0.5),
        BALL(lr=0.1, decay=0.9, slow=True),
    ),
    "states on both sides of a rule": chain(
        BALL(lr=0.1, decay=0.5, slow=True), BUDGET(budget=1.0), SMOOTH(beta=0.9), adam(0.1)
    ),
    "per matrix": chain(maximized(), BUDGET(budget=2.0), ROW(lr=0.1)),
    "no state": chain(SIGN(lr=0.1)),
}


def _tree(seed: int) -> dict[str, Tensor]:
    return {key: noise(seed + i, 3, 2) for i, key in enumerate("abc")}


@pytest.mark.parametrize("name", CUSTOM)
def test_scripted_in_place_and_pure_agree_bit_for_bit(name: str) -> None:
    optimizer = CUSTOM[name]
    scripted = optimizer.using(executor="script")
    params, state = _tree(0), optimizer.init(_tree(0))
    pure, pure_state = _tree(0), optimizer.init(_tree(0))
    written, written_state = _tree(0), optimizer.init(_tree(0))
    bound = list(_tree(0).values())
    program = optimizer.script(bound)
    for step in range(4):
        grads: dict[str, Any] = _tree(10 * (step + 1))
        grads["b"] = None if step == 1 else grads["b"]
        frozen = Frozen(params, grads, state)
        params, state = optimizer.update(params, grads, state)
        frozen.assert_untouched()
        pure, pure_state = scripted.update(pure, grads, pure_state)
        scripted.update_(written, grads, written_state)
        program.step(list(grads.values()))
    assert_same((pure, pure_state), (params, state))
    assert_same((written, written_state), (params, state))
    assert_same(bound, list(params.values()))
    assert_same(program.state.leaves, list(state.leaves.values()))


def test_a_rule_computes_what_it_says() -> None:
    param, grad = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])
    optimizer = CUSTOM["rule"]
    new, state = optimizer.update(param, grad, optimizer.init(param))
    new, state = optimizer.update(new, grad, state)
    velocity = 0.9 * grad + grad / 2**0.5
    torch.testing.assert_close(new, param - 0.1 * grad - 0.1 * velocity)
    torch.testing.assert_close(state.leaves.stages[0].velocity, velocity)


@pytest.mark.parametrize("name", CUSTOM)
def test_vmap_and_grad_go_through(name: str) -> None:
    optimizer = CUSTOM[name]
    params, grads = noise(0, 4, 3, 2), noise(1, 4, 3, 2)

    start = noise(2, 3, 2)

    def step(param: Tensor, grad: Tensor) -> Tensor:
        return optimizer.update(param, grad, optimizer.init(start))[0]

    batched = torch.vmap(step)(params, grads)
    for index in range(4):
        torch.testing.assert_close(
            batched[index], step(params[index], grads[index]), rtol=1e-13, atol=1e-14
        )
    assert torch.autograd.gradcheck(
        step, (params[0].clone().requires_grad_(), grads[0].clone().requires_grad_())
    )


def test_bounds_and_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"ball: decay must be a number >= 0 and < 1, got 1\.0"):
        BALL(lr=0.1, decay=1.0, slow=False)
    with pytest.raises(TypeError, match="ball: slow must be True or False, got 1"):
        BALL(lr=0.1, decay=0.9, slow=1)
    with pytest.raises(TypeError, match="ball has no hyper-parameter 'fast'"):
        BALL(lr=0.1, decay=0.9, slow=False, fast=True)
    with pytest.raises(ValueError, match="ball: lr must be a number, not NaN, got nan"):
        BALL(lr=float("nan"), decay=0.9, slow=True)


def test_a_state_of_other_options_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ball: .*'a'.* slow_copy is missing"):
        CUSTOM["rule with a list"].update(_tree(0), _tree(1), CUSTOM["rule"].init(_tree(0)))


class TestClearErrors:
    """What TorchScript cannot read is said in words, with the stage's name."""

    def _step(self, rule: Rule) -> None:
        optimizer = chain(rule(lr=0.1)).using(executor="script")
        param = torch.ones(2)
        optimizer.update(param, param, optimizer.init(param))

    def test_a_rule_without_annotations(self) -> None:
        rule = dataclasses.replace(SIGN, name="bare", rule=bare_rule)
        with pytest.raises(TypeError, match="bare: bare_rule must take four annotated arguments"):
            self._step(rule)
        with pytest.raises(TypeError, match="bare: bare_rule must take four annotated arguments"):
            chain(rule(lr=0.1)).script([torch.ones(2)])

    def test_a_lambda(self) -> None:
        rule = dataclasses.replace(SIGN, name="nameless", rule=lambda p, g, s, c: (p - g, s))
        with pytest.raises(TypeError, match=r"nameless: .* must take four annotated arguments"):
            self._step(rule)

    def test_they_run_by_the_reference_executor(self) -> None:
        for function in (bare_rule, lambda p, g, s, c: (p - c.lr * g.sign(), s)):
            rule = dataclasses.replace(SIGN, rule=function)
            optimizer, param = chain(rule(lr=0.1)), torch.ones(2)
            new, _ = optimizer.update(param, param, optimizer.init(param))
            torch.testing.assert_close(new, torch.full((2,), 0.9))

    def test_a_partial(self) -> None:
        rule = dataclasses.replace(SIGN, name="part", rule=functools.partial(SIGN.rule))
        with pytest.raises(TypeError, match="part: "):
            self._step(rule)

    def test_coefficients_without_annotations(self) -> None:
        rule = dataclasses.replace(BALL, name="loose", coefficients=loose_coefficients)
        with pytest.raises(TypeError, match=r"loose: .*annotat"):
            chain(rule(lr=0.1, decay=0.9, slow=False)).script([torch.ones(2)])


def bare_rule(param, grad, state, c):
    return param - c.lr * grad.sign(), state


def loose_coefficients(step, hyper):
    return BallHyper(hyper.lr, hyper.decay, hyper.slow)


def round_coefficients(step: float, hyper: SignHyper) -> SignHyper:
    """A whole number where the field says float, as Python allows."""
    return SignHyper(1 if step == 1.0 else hyper.lr)


def summing_rule(
    param: Tensor, grad: Tensor, state: NoState, c: SignHyper
) -> tuple[Tensor, NoState]:
    return (param - c.lr * grad).sum(), state


class TestWhatPythonAllows:
    """A stage is plain Python first: what reads as a rule runs as one, or is refused by name."""

    def test_whole_numbers_are_numbers_for_the_script_executor(self) -> None:
        rule = dataclasses.replace(SIGN, name="whole", coefficients=round_coefficients)
        optimizer, param = chain(rule(lr=0.1)), torch.ones(2)
        expected = optimizer.update(param, param, optimizer.init(param))
        scripted = optimizer.using(executor="script")
        assert_same(scripted.update(param, param, optimizer.init(param)), expected)

    @pytest.mark.parametrize("method", ["update", "update_"])
    @pytest.mark.parametrize(
        ("rule", "lr", "param"),
        [
            (dataclasses.replace(SIGN, name="summing", rule=summing_rule), 0.1, torch.ones(3)),
            # A double that is differentiated stays a tensor: 0-d beside a 0-d float.
            (SIGN, torch.tensor(0.1, requires_grad=True), torch.ones(())),
        ],
        ids=["shape", "dtype"],
    )
    def test_a_rule_that_changes_shape_or_dtype_is_named_with_the_leaf(
        self, rule: Rule, lr: Any, param: Tensor, method: str
    ) -> None:
        optimizer, params = chain(rule(lr=lr)), {"leaf": param.clone()}
        frozen = Frozen(params)
        with pytest.raises(RuntimeError, match="'leaf'"):
            getattr(optimizer, method)(params, params, optimizer.init(params))
        frozen.assert_untouched()

    def test_what_init_takes_from_a_parameter_has_a_derivative(self) -> None:
        """Half of the new parameter is a copy that init made of the old one, and the step's."""
        optimizer = CUSTOM["rule with a list"]

        def step(param: Tensor) -> Tensor:
            return optimizer.update(param, noise(1, 3), optimizer.init(param))[0]

        assert torch.autograd.gradcheck(step, noise(0, 3).requires_grad_())

    def test_a_pointwise_rule_may_keep_a_number_per_leaf(self) -> None:
        """As NAdam and ASGD do: the same for every element, so it can still be cut anywhere."""
        optimizer, param, grad = chain(PACED(lr=0.5)), noise(0, 3), noise(1, 3)
        new, state = optimizer.update(param, grad, optimizer.init(param))
        new, state = optimizer.update(new, grad, state)
        torch.testing.assert_close(new, param - 0.5 * grad * (0.5 + 0.25))
        assert state.leaves.stages[0].pace.item() == 0.25

    def test_defaults_of_a_hyper_class_are_its_defaults(self) -> None:
        class Hyper(NamedTuple):
            lr: float = 0.5
            decay: float = 0.9
            slow: bool = False

        rule = dataclasses.replace(BALL, hyper=Hyper)
        assert tuple(rule().hyper) == (0.5, 0.9, False)
        assert tuple(rule(decay=0.1).hyper) == (0.5, 0.1, False)
        assert BallHyper(0.5, 0.1, False) == rule(decay=0.1).hyper
