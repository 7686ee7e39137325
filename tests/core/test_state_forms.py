"""Init is asked for fields of state again where it would look at another value, and only then."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Rule, TorchOptimizer, adamw, sgd
from functional_optim.core.state_forms import StateForms

from ..choices import case

KINDS = [((3,), torch.float32), ((2, 2), torch.float64)]


class Hyper(NamedTuple):
    lr: float
    momentum: float = 0.0
    averages: bool = False


class Kept(NamedTuple):
    buffer: list[Tensor]


def by_name(hyper: Hyper) -> bool:
    return hyper.momentum != 0


def by_place(hyper: Hyper) -> bool:
    return hyper[1] != 0


def unpacked(hyper: Hyper) -> bool:
    _, momentum, _ = hyper
    return momentum != 0


def as_dict(hyper: Hyper) -> bool:
    return bool(hyper._asdict()["momentum"] != 0)


def replaced(hyper: Hyper) -> bool:
    return hyper._replace(lr=0.0).momentum != 0


def compared(hyper: Hyper) -> bool:
    return hyper != Hyper(hyper.lr)


def joined(hyper: Hyper) -> bool:
    return (0.0, *hyper)[2] != 0


LOOKS: list[Callable[[Hyper], bool]] = [
    by_name,
    by_place,
    unpacked,
    as_dict,
    replaced,
    compared,
    joined,
]


def rule(looks: Callable[[Hyper], bool], asked: list[Any]) -> Rule:
    def init(param: Tensor, hyper: Hyper) -> Kept:
        asked.append(None)
        assert isinstance(hyper, Hyper)
        return Kept([torch.zeros_like(param)] if looks(hyper) else [])

    return Rule(
        name="looking",
        hyper=Hyper,
        state=Kept,
        init=init,
        coefficients=lambda step, hyper: hyper,
        rule=lambda param, grad, state, c: (param, state),
    )


def test_another_value_is_seen_however_init_looks_at_it() -> None:
    for looks in LOOKS:
        asked: list[Any] = []
        forms = StateForms([rule(looks, asked)], [Hyper(0.1)], KINDS)
        with case(looks=looks.__name__):
            assert not forms.hold([Hyper(0.1, momentum=0.9)])
            assert forms.hold([Hyper(0.1)])
            assert forms.hold([Hyper(0.2)])


def test_init_is_not_asked_where_it_looked_at_nothing_that_changed() -> None:
    asked: list[Any] = []
    forms = StateForms([rule(by_name, asked)], [Hyper(0.1, 0.9)], KINDS)
    asked.clear()
    for k in range(5):
        assert forms.hold([Hyper(0.1 * k, 0.9, averages=bool(k % 2))])
    assert asked == []
    assert forms.hold([Hyper(0.1, 0.5)])
    assert len(asked) == len(KINDS)


def test_what_was_refused_is_refused_again() -> None:
    forms = StateForms([rule(by_name, [])], [Hyper(0.1)], KINDS)
    for _ in range(2):
        assert not forms.hold([Hyper(0.1, momentum=0.9)])


def test_a_value_that_may_be_filled_with_another_is_looked_at_again() -> None:
    asked: list[Any] = []
    momentum: Any = torch.zeros(())
    forms = StateForms([rule(by_name, asked)], [Hyper(0.1, momentum)], KINDS)
    momentum.fill_(0.9)
    assert not forms.hold([Hyper(0.1, momentum)])


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

    monkeypatch.setattr("functional_optim.core.initial.init_leaf", refused)
    for k in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 2)
        optimizer.step()
