"""Keys of chunks, which are computed once and stay valid for later steps."""

import operator
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch

from functional_optim import Optimizer, adamw, chain, clip_by_value, lion, qhm, sgd, weight_decay
from functional_optim.core.leaf import Leaf
from functional_optim.kernels import cache_key
from functional_optim.kernels.cache_key import reader
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.kernels.signature import VARIES, Container, signature
from functional_optim.testing.chain_cases import ONE_CHAIN

from ...choices import case
from ..rules import RULES
from ..support import Twins, chunk_of, noise


class Mode(Enum):
    FAST = 1


class Pair(NamedTuple):
    one: float
    two: float


class Many(NamedTuple):
    lr: float
    betas: tuple[float, float]
    pair: Pair
    flag: bool
    count: int
    mode: Mode
    none: None


MANY = Many(0.5, (0.1, 0.2), Pair(0.3, 0.4), True, 3, Mode.FAST, None)
STATIC = (
    VARIES,
    Container(tuple, (VARIES, VARIES)),
    Container(Pair, (VARIES, VARIES)),
    True,
    3,
    Mode.FAST,
    None,
)


def test_numbers_are_read_in_the_order_of_the_signature() -> None:
    leaf = Leaf(torch.ones(1), torch.ones(1), ((),), (MANY,), "")
    shape, numbers, _ = signature(sgd().stages[-1:], leaf)
    assert shape.static == (STATIC,)
    assert reader((Many,), (STATIC,))((MANY,)) == numbers == [0.5, 0.1, 0.2, 0.3, 0.4]


def test_a_memo_outlives_parameter_and_gradient() -> None:
    """A key is reused for new parameters and gradients, but follows new states and dtypes."""
    stages = sgd(momentum=0.9).stages[-1:]
    coefficients = sgd(momentum=0.9).links[-1].hyper
    state = (torch.zeros(1),)
    chunk = Leaf(torch.ones(1), torch.ones(1), (state,), (coefficients,), "", entries={})
    first, *_ = cache_key.key_of(stages, chunk)
    other = chunk._replace(param=torch.zeros(1), grad=torch.zeros(1))
    again, _, tensors = cache_key.key_of(stages, other)
    assert again is first
    assert all(map(operator.is_, tensors, (other.param, other.grad, state[0])))
    moved = chunk._replace(states=((torch.ones(1),),))
    assert cache_key.key_of(stages, moved)[2][2] is moved.states[0][0]
    wide = chunk._replace(grad=torch.ones(1, dtype=torch.float64))
    assert cache_key.key_of(stages, wide)[0].dtypes[1] == torch.float64


OTHERS = [
    MANY._replace(flag=False),
    MANY._replace(flag=1),  # equal to True, but a different choice
    MANY._replace(count=4),
    MANY._replace(count=3.0),
    MANY._replace(mode=None),
    MANY._replace(none=0.0),
    MANY._replace(lr=1),
    MANY._replace(lr=torch.tensor(0.5)),
    MANY._replace(betas=(0.1, 0.2, 0.3)),
    MANY._replace(betas=[0.1, 0.2]),
    MANY._replace(pair=(0.3, 0.4)),
    MANY._replace(betas=(0.1, True)),
    Pair(0.1, 0.2),
]


def test_anything_else_than_other_numbers_is_seen() -> None:
    fetch = reader((Many,), (STATIC,))
    for other in OTHERS:
        with case(other=other):
            assert fetch((other,)) is None
    assert fetch((MANY, MANY)) is None


KEEPING_NUMBERS = ("asgd", "nadam")
"""Rules whose state has one scalar for a whole parameter."""


def test_every_chain_is_a_program_and_read_as_its_signature_says() -> None:
    """A chain without a program would run slowly by the reference, and no law would notice."""
    table = {name: one.factory() for name, one in ONE_CHAIN.items()}
    for name, optimizer in {**table, **RULES}.items():
        fetch = None
        for step in (1.0, 2.0, 50.0):
            leaf = chunk_of(optimizer, torch.ones(4), step=step)
            shape, numbers, _ = signature(optimizer.stages, leaf)
            fetch = fetch or reader(tuple(map(type, leaf.coefficients)), shape.static)
            with case(name=name, step=step):
                assert fetch(leaf.coefficients) == numbers
        with case(name=name):
            bound = optimizer.using(executor="blocked").bind({"w": noise(0, 40)})
            whole = why_not_pointwise(optimizer.stages)
            if name in KEEPING_NUMBERS:
                whole = whole or "its state has another shape"
            assert bound.explain().endswith(f"one by one: {whole}" if whole else ": blocked")


CHAINS: dict[str, Optimizer] = {
    "lion": lion(0.1),
    "chain": chain(clip_by_value(0.5), weight_decay(0.1), qhm(0.1)),
    "adamw": adamw(0.1),
}


def test_a_bound_chunk_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def noted(stages: Any, leaf: Leaf, **options: Any) -> Any:
        looked.append(leaf)
        return signature(stages, leaf, **options)

    monkeypatch.setattr(cache_key, "signature", noted)
    for name, optimizer in CHAINS.items():
        looked.clear()
        twins = Twins(optimizer, lambda: {"w": noise(0, 60)}, "blocked")
        with case(name=name):
            for step in range(5):
                twins.bound.step({"w": noise(step, 60)})
            assert len(looked) == 1


def test_an_option_that_changes_is_seen() -> None:
    """A changed option changes the graph of later steps, or of a single step."""
    twins = Twins(sgd(0.1, momentum=0.9), lambda: {"w": noise(0, 60)}, "blocked")
    for step in range(6):
        if step == 2:
            twins.bound.set_hyper(nesterov=True)
            twins.optimizer = twins.optimizer.replace(nesterov=True)
        twins.step({"w": noise(step, 60)}, **({"maximize": True} if step == 4 else {}))
