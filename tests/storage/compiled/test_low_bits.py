"""Compiled steps keep the low bits that a storage keeps.

Inductor removes a cast to bfloat16 and back. A master or a compensation computed by such a cast
would be lost silently.
"""

import shutil
from typing import Any

import pytest
import torch

from functional_optim import sgd
from functional_optim.storage import stored

from ...choices import case
from ...tensors import normal

STORAGES = ("bfloat16+master", "bfloat16+kahan")


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a compiler")
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # caused by torch
def test_low_bits_survive() -> None:
    links = [stored(sgd(lr=1.0), param=param).links[-1] for param in STORAGES]
    coefficients = [link.stage.coefficients(1.0, link.hyper) for link in links]
    value = torch.ones(600).bfloat16()
    grad = (2.0**-11 * (1 + normal(600).abs())).bfloat16()

    def step(one: Any, other: Any) -> Any:
        first, second = (link.stage for link in links)
        return [
            first.rule(one[0], grad, one[1], coefficients[0]),
            second.rule(other[0], grad, other[1], coefficients[1]),
        ]

    compiled = torch.compile(step)
    got = want = [(value, link.stage.init(value, link.hyper)) for link in links]
    for _ in range(3):
        got, want = compiled(*got), step(*want)
    for name, one, two in zip(STORAGES, got, want, strict=True):
        with case(param=name):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1][0], two[1][0])
            assert bool((two[1][0] != two[0]).any())
