"""Text of a TorchScript program, its sources, and the memory that it accepts."""

import copy
import dataclasses
import functools
import linecache
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    adamw,
    chain,
    clip_by_global_norm,
    qhm,
    sgd,
    stored,
)
from functional_optim.kernels.errors import UnscriptableError
from tests.choices import each_value

from ..stages import BALL, SIGN, BallCoefficients, BallHyper, SignHyper
from ..support import assert_same, noise, refused


class Twins:
    """Program and ``update_`` by the reference on equal lists, compared bit by bit at each step."""

    def __init__(self, optimizer: Optimizer, params: list[Tensor], own: list[Tensor]) -> None:
        self.optimizer, self.own, self.state = optimizer, own, optimizer.init(own)
        self.program = optimizer.script(params)

    def step(self, grads: list[Any], own: list[Any] | None = None, **hyper: Any) -> None:
        self.program.step(grads)
        self.optimizer.update_(self.own, grads if own is None else own, self.state, **hyper)
        assert_same((self.program.params, self.program.state), (self.own, self.state))


def twins(optimizer: Optimizer, make: Callable[[int], list[Tensor]]) -> Twins:
    return Twins(optimizer, make(0), make(0))


@each_value(shape=[(), (2,), (3, 1), (2, 3, 4)], dtype=[torch.float32, torch.float64])
def test_programs_of_one_chain_serve_many_trees(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """TorchScript specialises a program for its latest inputs."""
    for rate in (0.1, 0.2):
        pair = twins(sgd(rate, momentum=0.9), lambda seed: [noise(seed, *shape, dtype=dtype)])
        for step in range(3):
            pair.step([noise(step + 1, *shape, dtype=dtype)])


@each_value(
    optimizer={
        "nesterov": sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "adamw": adamw(0.1, amsgrad=True),
        "clipped": chain(clip_by_global_norm(1.0), qhm(0.1, weight_decay=0.1)),
    },
    shift=[0, 3, 40],
)
def test_gradients_that_share_memory_with_what_is_written(optimizer: Optimizer, shift: int) -> None:
    """Gradients that alias or overlap a parameter are read before anything is written."""
    memory = noise(0, 100)
    pair = Twins(optimizer, [memory[:40]], [noise(0, 100)[:40].clone()])
    for _ in range(2):
        grad = memory[shift:][:40]
        pair.step([grad], [grad.clone()])


def test_flags_that_are_set_later() -> None:
    pair = twins(sgd(0.1, momentum=0.9), lambda seed: [noise(seed, 9)])
    changes: list[dict[str, Any]] = [{}, {"nesterov": True}, {"maximize": True}, {"lr": 0.5}]
    for step, hyper in enumerate(changes):
        pair.optimizer = pair.optimizer.replace(**hyper)
        pair.program.set_hyper(**hyper)
        pair.step([noise(step, 9)])


class Named(NamedTuple):
    params: Tensor  # has the parameter's shape and dtype
    raw: Tensor  # has the parameter's shape and dtype


def named_init(param: Tensor, hyper: BallHyper) -> Named:
    return Named(torch.zeros_like(param), torch.ones_like(param))


def named(param: Tensor, grad: Tensor, state: Named, c: BallCoefficients) -> tuple[Tensor, Named]:
    total = state.params + grad
    return param - c.lr * total * state.raw, Named(total, state.raw * 0.5)


def test_a_rule_may_use_the_names_that_a_program_uses() -> None:
    rule = dataclasses.replace(BALL, name="total", rule=named, state=Named, init=named_init)
    pair = twins(chain(rule(lr=0.1, decay=0.9, slow=False)), lambda seed: [noise(seed, 5)])
    for step in range(3):
        pair.step([noise(step, 5)])


@each_value(
    optimizer=[adamw(0.1), chain(clip_by_global_norm(1.0), qhm(0.1, 0.9))],
    way=[copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
)
def test_a_copied_chain_can_be_scripted(optimizer: Optimizer, way: Any) -> None:
    pair = twins(way(optimizer), lambda seed: [noise(seed, 3)])
    pair.step([noise(1, 3)])


def test_programs_survive_a_cleared_line_cache() -> None:
    """Debuggers and test tools clear the line cache, and a program must still find its source."""
    kept = dict(linecache.cache)
    sgd(0.1).script([torch.ones(2)])
    try:
        linecache.clearcache()
        params = [torch.ones(2)]
        sgd(0.5).script(params).step([torch.ones(2)])
    finally:
        linecache.cache.update(kept)
    assert_same(params[0], torch.full((2,), 0.5))


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
        with refused(TypeError, message):
            chain(rule(lr=0.1, **hyper)).script([torch.ones(2)])


@pytest.mark.parametrize("how", [{"state": "bfloat16"}, {"param": "bfloat16+kahan"}], ids=str)
def test_stored_stages_are_refused_by_name(how: dict[str, Any]) -> None:
    """Stored stages consist of objects, which TorchScript cannot compile."""
    dtype = torch.bfloat16 if "param" in how else torch.float32
    optimizer, param = stored(adamw(0.1), **how), torch.ones(600, dtype=dtype)
    before = param.clone()
    with pytest.raises(UnscriptableError, match=r"stored.* is no plain function.* by update_"):
        optimizer.script([param])
    assert torch.equal(param, before)


def once(grad: Tensor) -> Tensor:
    return grad


def twice(grad: Tensor) -> Tensor:
    return grad * 2.0


def helped(param: Tensor, grad: Tensor, state: NoState, c: SignHyper) -> tuple[Tensor, NoState]:
    return param - c.lr * once(grad), state


def test_a_helper_that_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchScript keeps the helper that it read when it compiled the rule."""
    optimizer = chain(dataclasses.replace(SIGN, name="helped", rule=helped)(lr=0.1))
    optimizer.script([torch.ones(2)])
    monkeypatch.setattr(sys.modules[__name__], "once", twice)
    with pytest.raises(UnscriptableError, match=r"helped reads .* use update_ or bind"):
        optimizer.script([torch.ones(2)])
