"""The law "one result" names the operation with several results, and accepts sound rules."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain, clip_by_global_norm, sgd, stored
from functional_optim.testing import LawBroken, check_optimizer


class Hyper(NamedTuple):
    lr: float = 0.1
    beta: float = 0.7


def sigmoid(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return p - c.lr * torch.sigmoid(g), s


def power(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return p - c.lr * g.abs() ** 0.3, s


def number_with_alpha(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return p - c.lr * torch.add(g, 0.3, alpha=c.beta), s


def looks_at_its_numbers(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Step by a rule that reads a hyper-parameter in Python, so that no graph can be made."""
    return (p - c.lr * torch.sigmoid(g) if c.lr > 0.0 else p), s


def plain(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return torch.lerp(p, g.exp().clamp(max=3.0).sqrt() / (g.abs() + 1.0), c.lr), s


def matrix(p: Tensor, g: Tensor, s: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return p - c.lr * torch.sigmoid(g), s


def made(rule: Any, **options: Any) -> Optimizer:
    return chain(Rule(name=rule.__name__, hyper=Hyper, rule=rule, **options)())


BROKEN = [
    (sigmoid, "rounding of the operation 'sigmoid' depends on the position"),
    (power, "rounding of the operation 'pow' depends on the position"),
    (number_with_alpha, "rounding of the operation 'add' depends on the position"),
    (looks_at_its_numbers, "rounding of the operation 'sigmoid' depends on the position"),
]


def test_the_operation_is_named() -> None:
    for rule, said in BROKEN:
        with pytest.raises(LawBroken, match=said):
            check_optimizer(
                lambda rule=rule: made(rule),
                dtypes=[torch.float32],
                laws=["one result"],
                max_examples=1,
            )


def test_nobody_else_is_accused() -> None:
    for optimizer in (
        made(plain),
        made(matrix, kind="per_matrix"),
        chain(clip_by_global_norm(0.1), sgd(0.1, momentum=0.9)),
        stored(sgd(0.1), state="int8"),
    ):
        check_optimizer(lambda one=optimizer: one, laws=["one result"], max_examples=1)
