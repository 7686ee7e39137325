"""Keys of chunks, which are computed once and stay valid for later steps."""

from enum import Enum
from typing import NamedTuple

import torch

from functional_optim import sgd
from functional_optim.core.leaf import Leaf
from functional_optim.kernels.cache_key import reader
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.kernels.signature import VARIES, Container, signature
from tests.cases import ONE_CHAIN

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


def test_an_option_that_changes_is_seen() -> None:
    """A changed option changes the graph of later steps, or of a single step."""
    twins = Twins(sgd(0.1, momentum=0.9), lambda: {"w": noise(0, 60)}, "blocked")
    for step in range(6):
        if step == 2:
            twins.bound.set_hyper(nesterov=True)
            twins.optimizer = twins.optimizer.replace(nesterov=True)
        twins.step({"w": noise(step, 60)}, **({"maximize": True} if step == 4 else {}))
