"""A stored step is the same however a parameter is cut and laid out, and learns as float32 does.

The laws of all optimizers, over every storage and rule: tests/laws.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer, adamw
from functional_optim.executors.leaf import is_measured
from functional_optim.stage import grain_of
from functional_optim.storage import stored

from ..choices import case, examples, pairs
from ..tensors import assert_same, normal
from .support import CHOICES, made


def in_pieces(state: Any, cuts: list[int], grain: int) -> list[Any]:
    """The state of a 1-D leaf, cut as an executor cuts it."""
    pieces = []
    for start, end in itertools.pairwise(cuts):
        blocks = slice(start // grain, -(-end // grain))

        def cut(tensor: Tensor, a: int = start, b: int = end, c: slice = blocks) -> Tensor:
            return tensor[a:b].clone() if tensor.numel() == cuts[-1] else tensor[c].clone()

        stages = tuple(
            type(one)(*([cut(t) for t in v] if isinstance(v, list) else cut(v) for v in one))
            if one
            else ()
            for one in state.leaves.stages
        )
        leaf = state.leaves._replace(step=state.leaves.step.clone(), stages=stages)
        pieces.append(state._replace(leaves=leaf))
    return pieces


def require_same_in_pieces(optimizer: Optimizer, param: Tensor, marks: set[int]) -> None:
    grain, length = grain_of(optimizer.stages), param.numel()
    cuts = sorted({0, length, *(256 * mark for mark in marks if 256 * mark < length)})
    state = optimizer.init(param)
    parts = [param[a:b].clone() for a, b in itertools.pairwise(cuts)]
    states = in_pieces(state, cuts, grain)
    for step in range(2):
        grad = normal(length, seed=step).to(param.dtype)
        totals: list[Tensor] = []
        for stage in optimizer.stages:
            if is_measured(stage):
                totals.append(optimizer.measure(param, grad, state, measured=totals))
        for i, (a, b) in enumerate(itertools.pairwise(cuts)):
            piece = grad[a:b].clone()
            parts[i], states[i] = optimizer.update(parts[i], piece, states[i], measured=totals)
        param, state = optimizer.update(param, grad, state, measured=totals)
    assert_same(torch.cat(parts), param)
    want = in_pieces(state, cuts, grain)
    assert_same([one.leaves.stages for one in states], [one.leaves.stages for one in want])


@examples(3)
@given(length=st.integers(513, 900), marks=st.sets(st.integers(1, 3), min_size=1))
def test_any_split_at_multiples_of_the_granularity(length: int, marks: set[int]) -> None:
    """State and all."""
    for name in CHOICES:
        with case(name=name):
            optimizer, dtype = made(name)
            require_same_in_pieces(optimizer, normal(length, seed=1).to(dtype), marks)


def test_the_layout_of_a_parameter_is_no_matter() -> None:
    for chosen in pairs(name=list(CHOICES), layout=["transposed", "sliced", "scalar", "empty"]):
        with case(**chosen):
            optimizer, dtype = made(chosen["name"])
            base = normal(20, 16, seed=2, dtype=dtype)
            param = {
                "transposed": base.T,
                "sliced": base[:, ::2],
                "scalar": base[0, 0],
                "empty": base[:0],
            }[chosen["layout"]]
            grad = normal(*param.shape, seed=3, dtype=dtype)
            got, state = optimizer.update(param, grad, optimizer.init(param))
            plain = param.contiguous()
            want, wanted = optimizer.update(plain, grad, optimizer.init(plain))
            assert got.stride() == param.stride()
            assert_same((got, state), (want, wanted))


LEARNS = (
    {"param": "bfloat16+master"},
    {"param": "bfloat16+kahan"},
    {"param": "bfloat16+stochastic"},
    {"state": "bfloat16+stochastic"},
    {"state": "int8+stochastic"},
    {"param": "bfloat16+kahan", "state": "int8+stochastic"},
    {"param": "bfloat16+stochastic", "state": "int8+stochastic"},
)


def distance(optimizer: Optimizer, dtype: torch.dtype) -> float:
    """How far from the least of a quadratic function many steps end."""
    target, curvature = normal(256, seed=1), 1 + normal(256, seed=2).square()
    param = (target + 0.08 * normal(256, seed=3)).to(dtype)
    state = optimizer.init(param)
    for step in range(60):
        noise = 0.01 * normal(256, seed=10 + step)
        grad = curvature * (param.float() - target) + noise
        optimizer.update_(param, grad.to(dtype), state)
    return float((param.float() - target).abs().mean())


def test_it_learns_as_float32_does() -> None:
    base = adamw(lr=5e-4, weight_decay=0.0)
    plain = distance(base, torch.float32)
    for arguments in LEARNS:
        with case(**arguments):
            dtype = torch.bfloat16 if "param" in arguments else torch.float32
            assert distance(stored(base, **arguments), dtype) == pytest.approx(plain, rel=0.1)
    # Rounding to nearest does not: so the above is able to fail.
    assert distance(stored(base, param="bfloat16"), torch.bfloat16) > 1.25 * plain
