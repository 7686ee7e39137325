"""The script executor is the reference executor, bit for bit, with everything that can be given."""

import dataclasses
import functools
import linecache
from typing import Any

import pytest
import torch

from functional_optim import Optimizer, Rule, adam, adamw, chain, clip_by_global_norm, sgd
from tests.choices import each_value

from ...choices import case
from ..scenarios import (
    SCENARIOS,
    Scenario,
    assert_steps_alike,
    assert_totals_are_taken_in_turn,
    mixed,
)
from ..sharing_stages import SHARING
from ..sparse import SPARSE, sparse_rows
from ..stages import BALL, CUSTOM, SIGN, BallHyper, SignHyper
from ..support import (
    CHAINS,
    EVERY,
    Frozen,
    assert_nothing_left_behind,
    assert_same,
    noise,
    refused,
    tree,
)


@pytest.mark.parametrize("scenario", [mixed, SCENARIOS["extreme"]])
def test_scripted_is_the_reference(scenario: Scenario) -> None:
    for name, optimizer in EVERY.items():
        with case(name=name):
            assert_steps_alike(optimizer, scenario, "script")


@each_value(optimizer={**CUSTOM, **{name: make() for name, make in SHARING.items()}})
def test_so_are_stages_of_a_users_own(optimizer: Optimizer) -> None:
    """Also those that hand on what they were given."""
    assert_steps_alike(optimizer, lambda step: {"a": noise(step, 3, 2)}, "script")


@each_value(name=list(SPARSE))
def test_so_are_sparse_gradients(name: str) -> None:
    _, make, hyper = SPARSE[name]
    assert_steps_alike(make(**hyper), sparse_rows, "script")


@each_value(optimizer=CHAINS)
def test_every_measured_stage_takes_its_own_total(optimizer: Optimizer) -> None:
    assert_totals_are_taken_in_turn(optimizer.using(executor="script"))


@each_value(reference={name: EVERY[name] for name in ("adamw", "lion", "rprop", "clipped twice")})
def test_parameters_that_require_grad(reference: Optimizer) -> None:
    """Through autograd's own version of the program, also after it has been specialised."""
    scripted, state = reference.using(executor="script"), reference.init(torch.zeros(3))
    for step in range(3):
        grad = noise(step + 1, 3, dtype=torch.float32)
        leaves = [noise(0, 3, dtype=torch.float32).requires_grad_() for _ in range(2)]
        wanted = reference.update(leaves[0], grad, state)
        made = scripted.update(leaves[1], grad, state)
        assert_same(made, wanted)
        (want,) = torch.autograd.grad(wanted[0].sum(), leaves[0])
        (got,) = torch.autograd.grad(made[0].sum(), leaves[1])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_overrides_and_schedules_reach_scripted_leaves() -> None:
    """And what is given for one step."""
    reference = (
        chain(clip_by_global_norm(1.0), adam(lambda made: 0.1 / (1 + made)))
        .override(("w",), lr=0.3, betas=(0.5, 0.6))
        .override(("b",), amsgrad=True)
        .override(("s",), max_norm=0.1, maximize=True)
    )
    scripted = reference.using(executor="script")
    params, state = tree(0), reference.init(tree(0))
    other, other_state = tree(0), scripted.init(tree(0))
    for step in range(3):
        hyper: Any = {"lr": 0.2} if step == 1 else {}
        params, state = reference.update(params, tree(step + 1), state, **hyper)
        other, other_state = scripted.update(other, tree(step + 1), other_state, **hyper)
    assert_same((other, other_state), (params, state))
    assert [len(leaf.stages[-1].max_exp_avg_sq) for leaf in state.leaves.values()] == [0, 1, 0, 0]
    scheduled = adamw(lambda made: 0.1 / (1 + made))
    assert_steps_alike(scheduled, SCENARIOS["float32"], "script")


@each_value(where=[(), ("b",)], method=["update", "update_"])
def test_a_differentiated_hyper_parameter_is_refused_and_nothing_changes(
    where: tuple[str, ...], method: str
) -> None:
    params, rate = {"a": noise(0, 3), "b": noise(1, 3)}, torch.tensor(0.1, requires_grad=True)
    optimizer = adam(0.1).override(where, lr=rate).using(executor="script")
    state = optimizer.init(params)
    frozen = Frozen(params, state)
    with pytest.raises(TypeError, match=r"adam .* tensor.* numbers.* executor='reference'"):
        getattr(optimizer, method)(params, params, state)
    frozen.assert_untouched()


@each_value(
    rate=[0.1, 0.2],
    shape=[(), (2,), (3, 1), (2, 3, 4)],
    dtype=[torch.float32, torch.float64],
)
def test_one_program_serves_many_trees(
    rate: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Specialised for what it saw last, it must still be right for other shapes and dtypes."""
    optimizer = sgd(rate, momentum=0.9)
    assert_steps_alike(optimizer, lambda step: {"a": noise(step, *shape, dtype=dtype)}, "script")


def test_programs_survive_a_cleared_line_cache() -> None:
    """Debuggers and test tools clear it; the source of a program must not go with it."""
    kept = dict(linecache.cache)
    sgd(0.1).script([torch.ones(2)])
    try:
        linecache.clearcache()
        params = [torch.ones(2)]
        sgd(0.5).script(params).step([torch.ones(2)])
    finally:
        linecache.cache.update(kept)
    assert_same(params[0], torch.full((2,), 0.5))


def test_update_in_place_leaves_no_tensor_behind() -> None:
    assert_nothing_left_behind([one.using(executor="script") for one in EVERY.values()])


def bare_rule(param, grad, state, c):
    return param - c.lr * grad.sign(), state


def loose_coefficients(step, hyper):
    return BallHyper(hyper.lr, hyper.decay, hyper.slow)


FOUR = "must take four annotated arguments"
UNREADABLE: list[tuple[Rule, str]] = [
    (dataclasses.replace(SIGN, name="bare", rule=bare_rule), f"bare: bare_rule {FOUR}"),
    (
        dataclasses.replace(SIGN, name="nameless", rule=lambda p, g, s, c: (p - g, s)),
        f"nameless: .* {FOUR}",
    ),
    (dataclasses.replace(SIGN, name="part", rule=functools.partial(SIGN.rule)), "part: "),
    (
        dataclasses.replace(BALL, name="loose", coefficients=loose_coefficients),
        "loose: .*annotat",
    ),
]


def test_what_torchscript_cannot_read_is_said_with_the_name_of_the_stage() -> None:
    for rule, message in UNREADABLE:
        hyper: dict[str, Any] = {"decay": 0.9, "slow": False} if rule.name == "loose" else {}
        optimizer, param = chain(rule(lr=0.1, **hyper)), torch.ones(2)
        with refused(TypeError, message):
            optimizer.script([param])
        if rule.name != "loose":  # the executor computes coefficients in Python
            scripted = optimizer.using(executor="script")
            with refused(TypeError, message):
                scripted.update(param, param, optimizer.init(param))


def round_coefficients(step: float, hyper: SignHyper) -> SignHyper:
    """A whole number where the field says float, as Python allows."""
    return SignHyper(1 if step == 1.0 else hyper.lr)


def test_what_python_allows_runs_too() -> None:
    """A stage is plain Python first: whole numbers are numbers."""
    rule = dataclasses.replace(SIGN, name="whole", coefficients=round_coefficients)
    assert_steps_alike(chain(rule(lr=0.1)), SCENARIOS["float32"], "script")
