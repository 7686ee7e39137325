"""A compiler that fuses the whole step keeps what a storage keeps.

Inductor leaves out a cast to bfloat16 and back. A master or a compensation that was found by such
a cast would be lost in silence.
"""

import shutil
from typing import Any

import pytest
import torch

from functional_optim import sgd
from functional_optim.storage import stored

from .support import normal

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler"
)


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own modules
@pytest.mark.parametrize("param", ["bfloat16+master", "bfloat16+kahan"])
def test_low_bits_survive(param: str) -> None:
    optimizer = stored(sgd(lr=1.0), param=param)
    stage, hyper = optimizer.stages[-1], optimizer.hypers_at(())[-1]
    c = stage.coefficients(1.0, hyper)
    value = torch.ones(600).bfloat16()
    grad = (2.0**-11 * (1 + normal(600).abs())).bfloat16()
    state = stage.init(value, hyper)

    def step(param: Any, grad: Any, state: Any) -> Any:
        return stage.rule(param, grad, state, c)

    compiled = torch.compile(step)
    got = want = (value, state)
    for _ in range(3):
        got, want = compiled(got[0], grad, got[1]), step(want[0], grad, want[1])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1][0], want[1][0])
    assert bool((want[1][0] != want[0]).any())
