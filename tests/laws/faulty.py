"""Optimizers with one planted fault for each law, and the reports of the laws."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain, sgd
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.numeric import add
from functional_optim.testing import (
    LAWS,
    LawBroken,
    LeafSpec,
    Run,
    Subject,
    Values,
    check_optimizer,
)
from functional_optim.testing.subject import plain_oracle

from ..choices import case


class Hyper(NamedTuple):
    lr: float


def runs_on(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Step each element by all elements before it, which shapes alone do not show."""
    return param - c.lr * grad.reshape(-1).cumsum(0).reshape(grad.shape), state


def optimizer_of(rule: Callable[..., Any], **options: Any) -> Callable[..., Optimizer]:
    stage = Rule(name=rule.__name__, hyper=Hyper, rule=rule, **options)
    return lambda lr=0.1: chain(stage(lr=lr))


class Momentum(NamedTuple):
    momentum: Tensor


def zeros(param: Tensor, hyper: Hyper) -> Momentum:
    return Momentum(torch.zeros_like(param))


def writes_to_the_gradient(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    grad.mul_(2.0)
    return param - c.lr * grad, state


def writes_to_the_state(
    param: Tensor, grad: Tensor, state: Momentum, c: Hyper
) -> tuple[Tensor, Momentum]:
    state.momentum.add_(grad)
    return param - c.lr * state.momentum, state


CALLS: list[int] = []


def remembers(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    CALLS.append(1)
    return param - c.lr * grad * len(CALLS), state


def normalises(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad / (grad.abs().sum() + 1.0), state


def other_of_tensors(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    if isinstance(c.lr, Tensor):
        return add(param, grad, -2.0 * c.lr), state
    return add(param, grad, -c.lr), state


def branches_on_data(
    param: Tensor, grad: Tensor, state: NoState, c: Hyper
) -> tuple[Tensor, NoState]:
    if float(grad.sum()) > 0.0:
        return param - c.lr * grad, state
    return param, state


def cuts_the_graph(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param.detach() - c.lr * grad, state


def squashes(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * torch.sigmoid(grad), state


def too_long(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - 1.5 * c.lr * grad, state


LAST: list[Tensor] = [torch.zeros(())]


def sees_another(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Add 0 times another leaf's gradient, which shows only if that gradient is not finite."""
    other, LAST[0] = LAST[0], grad.detach().sum()
    return param - c.lr * grad + (0.0 * other).to(param.dtype), state


INITS = itertools.count()
COMMON = torch.zeros(())


def common(param: Tensor, hyper: Hyper) -> Momentum:
    """Return a state whose tensor is shared by all parameters, but for the first two calls.

    The engine refuses an ``init`` that returns the same memory in its first two calls.
    """
    return Momentum(COMMON if next(INITS) > 1 else torch.zeros(()))


class Average(NamedTuple):
    average: list[Tensor]


def for_some(param: Tensor, hyper: Hyper) -> Average:
    return Average([torch.zeros_like(param)] if hyper.lr < 0.3 else [])


def keeps_no_average(
    param: Tensor, grad: Tensor, state: Average, c: Hyper
) -> tuple[Tensor, Average]:
    return param - c.lr * grad, Average([one + 1.0 for one in state.average])


def keeps_no_gradient(
    param: Tensor, grad: Tensor, state: Momentum, c: Hyper
) -> tuple[Tensor, Momentum]:
    return param - c.lr * grad, Momentum(state.momentum + 1.0)


FAULTS = [
    ("pure", optimizer_of(writes_to_the_gradient), None),
    ("pure", optimizer_of(writes_to_the_state, state=Momentum, init=zeros), None),
    (
        "declared fields",
        optimizer_of(keeps_no_average, state=Average, init=for_some, state_depends_on=()),
        None,
    ),
    ("own memory", optimizer_of(keeps_no_gradient, state=Momentum, init=common), None),
    ("in place", optimizer_of(remembers), None),
    ("any moment", optimizer_of(remembers), None),
    ("any split by leaves", optimizer_of(remembers), None),
    ("any split by elements", optimizer_of(normalises), None),
    ("one result", optimizer_of(squashes), None),
    ("blocked is reference", optimizer_of(runs_on), None),
    ("any history", optimizer_of(remembers), None),
    ("bound is reference", optimizer_of(runs_on), None),
    ("capturable is close", optimizer_of(other_of_tensors), None),
    ("vmap is the loop", optimizer_of(branches_on_data), None),
    ("differentiable", optimizer_of(cuts_the_graph), None),
    ("contained", optimizer_of(sees_another), None),
    ("same as the oracle", optimizer_of(too_long), torch.optim.SGD),
]


def require_caught(law: str, factory: Any, oracle: Any = None) -> None:
    with pytest.raises(LawBroken) as caught:
        check_optimizer(factory, oracle, laws=[law], dtypes=[torch.float32], max_examples=10)
    assert caught.value.law == law
    assert law in str(caught.value)
    assert "smallest example" in str(caught.value)


SEVERAL = LeafSpec((5,), "contiguous", Values((1.0, -2.0, 0.5, 3.0, -0.25)))
TURNED = LeafSpec((3, 2), "transposed", Values((1.0, 2.0, 3.0, -4.0, -5.0, 6.0)))
RUN = Run(
    (),
    torch.float32,
    (SEVERAL, TURNED),
    ((SEVERAL.start, None), (SEVERAL.start, TURNED.start), (None, TURNED.start)),
)
REFUSALS = (AssertionError, NotPointwiseError, RuntimeError)


def require_caught_in_one_run(law: str, factory: Any, oracle: Any = None) -> None:
    """Make sure that the law catches the fault in one run, and accepts a sound optimizer."""
    run = replace(RUN, dtype=torch.float64 if LAWS[law].double_only else torch.float32)
    with case(law=law):
        if oracle is None:
            LAWS[law].check(Subject(lambda: sgd(0.1, momentum=0.9)), run)
        with pytest.raises(REFUSALS):
            LAWS[law].check(Subject(factory, plain_oracle(oracle)), run)
