"""Calls of ``init`` for the fields of state, only after a change of a value that ``init`` reads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, TorchOptimizer, adamw, chain, sgd
from functional_optim.core.state_init import StateFields
from functional_optim.testing import LawBroken, Subject, check_law

KINDS = [((3,), torch.float32), ((2, 2), torch.float64)]


class Hyper(NamedTuple):
    lr: float
    momentum: float = 0.0
    averages: bool = False


class Kept(NamedTuple):
    buffer: list[Tensor]


def by_name(hyper: Hyper) -> bool:
    return hyper.momentum != 0


def rule(
    looks: Callable[[Hyper], bool],
    asked: list[Any],
    depends_on: tuple[str, ...] | None = None,
) -> Rule:
    def init(param: Tensor, hyper: Hyper) -> Kept:
        asked.append(None)
        assert isinstance(hyper, Hyper)
        return Kept([torch.zeros_like(param)] if looks(hyper) else [])

    return Rule(
        name="looking",
        hyper=Hyper,
        state=Kept,
        init=init,
        state_depends_on=depends_on,
        coefficients=lambda step, hyper: hyper,
        rule=lambda param, grad, state, c: (param, state),
    )


def test_without_a_declaration_each_other_value_asks_init() -> None:
    asked: list[Any] = []
    fields = StateFields([rule(by_name, asked)], [Hyper(0.1)], KINDS)
    assert not fields.is_valid_for([Hyper(0.1, momentum=0.9)])
    assert fields.is_valid_for([Hyper(0.1)])
    asked.clear()
    assert fields.is_valid_for([Hyper(0.2)])
    assert len(asked) == len(KINDS)


def test_a_declaration_names_hyper_parameters() -> None:
    with pytest.raises(
        ValueError, match=r"state_depends_on must name hyper-parameters, got 'nesterov'"
    ):
        rule(by_name, [], ("nesterov",))


def test_the_law_finds_a_hyper_parameter_that_is_not_declared() -> None:
    def make(momentum: float = 0.5) -> Optimizer:
        return chain(rule(by_name, [], ("averages",))(lr=0.1, momentum=momentum))

    with pytest.raises(LawBroken, match="state_depends_on does not name momentum"):
        check_law("declared fields", Subject(make), max_examples=2)


def test_init_is_not_asked_where_it_looked_at_nothing_that_changed() -> None:
    asked: list[Any] = []
    forms = StateFields([rule(by_name, asked, ("momentum",))], [Hyper(0.1, 0.9)], KINDS)
    asked.clear()
    for k in range(5):
        assert forms.is_valid_for([Hyper(0.1 * k, 0.9, averages=bool(k % 2))])
    assert asked == []
    assert forms.is_valid_for([Hyper(0.1, 0.5)])
    assert len(asked) == len(KINDS)


def test_what_was_refused_is_refused_again() -> None:
    forms = StateFields([rule(by_name, [])], [Hyper(0.1)], KINDS)
    for _ in range(2):
        assert not forms.is_valid_for([Hyper(0.1, momentum=0.9)])


def test_a_value_that_may_be_filled_with_another_is_looked_at_again() -> None:
    asked: list[Any] = []
    momentum: Any = torch.zeros(())
    forms = StateFields([rule(by_name, asked)], [Hyper(0.1, momentum)], KINDS)
    momentum.fill_(0.9)
    assert not forms.is_valid_for([Hyper(0.1, momentum)])


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_learning_rate_that_changes_asks_no_init(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [torch.ones(k + 1, requires_grad=True) for k in range(3)]
    for one in params:
        one.grad = torch.ones_like(one)
    optimizer = TorchOptimizer(params, make(lr=0.1))
    for _ in range(4):
        optimizer.step()

    def refused(*_: Any) -> Any:
        raise AssertionError("init was asked for the fields of state")

    monkeypatch.setattr("functional_optim.core.state_init.init_leaf", refused)
    for k in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 2)
        optimizer.step()
