"""Custom rules and transforms, which have all features of the built-in stages."""

import dataclasses
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from ..choices import case
from .scenarios import SCENARIOS, Scenario, assert_steps_alike
from .stages import BALL, CUSTOM, PACED, SIGN, BallHyper, SignHyper
from .support import IN_PYTHON, Frozen, noise, step, steps


def _matrices(seed: int) -> dict[str, Any]:
    """Return matrices; at the second step, one gradient is missing."""
    made = {key: noise(10 * seed + i, 3, 2) for i, key in enumerate("abc")}
    return {**made, **({"b": None} if seed == 2 else {})}


@each_value(optimizer=CUSTOM, executor=IN_PYTHON)
def test_pure_and_in_place_agree_bit_for_bit(optimizer: Optimizer, executor: ExecutorName) -> None:
    assert_steps_alike(optimizer, _matrices, executor)


@each_value(
    optimizer={name: one for name, one in CUSTOM.items() if name != "per matrix"},
    scenario=SCENARIOS,
    executor=IN_PYTHON,
)
def test_so_they_do_for_every_kind_of_leaf(
    optimizer: Optimizer, scenario: Scenario, executor: ExecutorName
) -> None:
    assert_steps_alike(optimizer, scenario, executor)


def test_a_rule_computes_what_it_says() -> None:
    param, grad = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])
    new, state = steps(CUSTOM["rule"], param, lambda _: grad, 2)
    velocity = 0.9 * grad + grad / 2**0.5
    torch.testing.assert_close(new, param - 0.1 * grad - 0.1 * velocity)
    torch.testing.assert_close(state.leaves.stages[0].velocity, velocity)


@each_value(optimizer=CUSTOM)
def test_vmap_and_grad_go_through(optimizer: Optimizer) -> None:
    params, grads, start = noise(0, 4, 3, 2), noise(1, 4, 3, 2), noise(2, 3, 2)

    def stepped(param: Tensor, grad: Tensor) -> Tensor:
        return optimizer.update(param, grad, optimizer.init(start))[0]

    loop = torch.stack([stepped(*one) for one in zip(params, grads, strict=True)])
    torch.testing.assert_close(torch.vmap(stepped)(params, grads), loop, rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradcheck(
        stepped, (params[0].clone().requires_grad_(), grads[0].clone().requires_grad_())
    )


def test_what_init_takes_from_a_parameter_has_a_derivative() -> None:
    """Half of the new parameter is a copy that init made; the other half is from the step."""
    optimizer = CUSTOM["rule with a list"]
    assert torch.autograd.gradcheck(
        lambda param: step(optimizer, param, noise(1, 3)), noise(0, 3).requires_grad_()
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
        CUSTOM["rule with a list"].update(
            _matrices(0), _matrices(1), CUSTOM["rule"].init(_matrices(0))
        )


def test_defaults_of_a_hyper_class_are_its_defaults() -> None:
    class Hyper(NamedTuple):
        lr: float = 0.5
        decay: float = 0.9
        slow: bool = False

    rule = dataclasses.replace(BALL, hyper=Hyper)
    assert tuple(rule().hyper) == (0.5, 0.9, False)
    assert tuple(rule(decay=0.1).hyper) == (0.5, 0.1, False)
    assert BallHyper(0.5, 0.1, False) == rule(decay=0.1).hyper


def test_functions_without_annotations_run() -> None:
    """Only TorchScript needs annotations."""

    def bare(param, grad, state, c):
        return param - c.lr * grad.sign(), state

    for function in (bare, lambda p, g, s, c: (p - c.lr * g.sign(), s)):
        optimizer = chain(dataclasses.replace(SIGN, rule=function)(lr=0.1))
        torch.testing.assert_close(
            step(optimizer, torch.ones(2), torch.ones(2)), torch.full((2,), 0.9)
        )


def _summing(param: Tensor, grad: Tensor, state: NoState, c: SignHyper) -> tuple[Tensor, NoState]:
    return (param - c.lr * grad).sum(), state


def test_a_rule_that_changes_shape_or_dtype_is_named_with_the_leaf() -> None:
    """A differentiated lr stays a tensor in float64, and promotes a 0-d float32 parameter."""
    summing = dataclasses.replace(SIGN, name="summing", rule=_summing)(lr=0.1)
    for link, param in (
        (summing, torch.ones(3)),
        (SIGN(lr=torch.tensor(0.1, requires_grad=True)), torch.ones(())),
    ):
        for method in ("update", "update_"):
            optimizer, params = chain(link).using(executor="reference"), {"leaf": param.clone()}
            frozen = Frozen(params)
            with case(link=link, method=method), pytest.raises(RuntimeError, match="'leaf'"):
                getattr(optimizer, method)(params, params, optimizer.init(params))
            frozen.assert_untouched()


def test_a_pointwise_rule_may_keep_a_number_per_leaf() -> None:
    """NAdam and ASGD do so.

    The number is the same for every element, so a leaf can be cut anywhere.
    """
    param, grad = noise(0, 3), noise(1, 3)
    new, state = steps(chain(PACED(lr=0.5)), param, lambda _: grad, 2)
    torch.testing.assert_close(new, param - 0.5 * grad * (0.5 + 0.25))
    assert state.leaves.stages[0].pace.item() == 0.25


class SlowState(NamedTuple):
    velocity: Tensor
    extra: list[Tensor]


def slow_rule(
    param: Tensor, grad: Tensor, state: SlowState, c: SignHyper
) -> tuple[Tensor, SlowState]:
    velocity = state.velocity + grad
    return param - velocity, SlowState(velocity, state.extra)


def test_a_stage_without_init_starts_with_zeros_and_empty_lists() -> None:
    first, again = (
        Rule(name="slow", hyper=SignHyper, state=SlowState, rule=slow_rule) for _ in range(2)
    )
    assert first == again and hash(first) == hash(again)
    assert pickle.loads(pickle.dumps(first)) == first
    hypers = dict.fromkeys(SignHyper._fields, 0.5)
    optimizer = chain(first(**hypers))
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        with case(dtype=dtype):
            param = torch.ones(2, 3, dtype=dtype)
            (state,) = optimizer.init(param).leaves.stages
            assert state.extra == [] and state.velocity.dtype == dtype
            assert torch.equal(state.velocity, torch.zeros_like(param))
            new, _ = optimizer.update(param, param, optimizer.init(param))
            assert torch.equal(new, torch.zeros_like(param))
